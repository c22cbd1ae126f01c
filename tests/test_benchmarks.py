"""What the benchmark of a layer lets pass, and what it does not."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import ffn_layers
from benchmarks.ffn_truth import DisagreementError, truth_of
from benchmarks.workload import firing_rates, make_layer
from tests.kernels.cases import Inputs
from tests.kernels.truth import ffn_truth, row_errors

TOKENS, WIDTH, NEURONS = 96, 64, 256


@pytest.fixture(scope="module")
def case():
    layer = make_layer(TOKENS, WIDTH, firing_rates("heavy", NEURONS, 8.0))
    return layer, jax.random.normal(jax.random.key(7), (TOKENS, WIDTH), jnp.bfloat16)


def test_truth_is_the_formula(case):
    layer, y_bar = case
    got = truth_of(layer, y_bar, 0.5 * TOKENS, rows=40)
    expected = ffn_truth(Inputs(*layer, None, y_bar, 0.5 * TOKENS, None))
    for name, rows in got.items():
        assert row_errors(rows.value, expected[name]).max() < 1e-5, name
        # A rounding, not an excuse: far under what is asked of the median row.
        norms = np.linalg.norm(expected[name], axis=-1)
        share = np.asarray(rows.rounding)[norms > 0] / norms[norms > 0]
        assert np.median(share) < 2**-10, name


@pytest.mark.parametrize("output", [None, "y", "dx", "dw_gate", "dw_up", "dw_down"])
def test_one_wrong_row_is_found(case, output):
    layer, y_bar = case
    layers = ffn_layers.layers_of("reference", "train")

    def sparse(*arguments):
        y, stats, gradients = layers.sparse(*arguments)
        outputs = {
            "y": y,
            **dict(zip(("dx", "dw_gate", "dw_up", "dw_down"), gradients, strict=True)),
        }
        if output:
            rows = outputs[output]
            norms = jnp.linalg.norm(rows.astype(jnp.float32), axis=-1)
            # The smallest of those that are not 0: on the scale of the others it would be lost.
            row = jnp.argmin(jnp.where(norms > 0, norms, jnp.inf))
            outputs[output] = rows.at[row].multiply(1.25)
        return outputs["y"], stats, tuple(outputs.values())[1:]

    changed = layers._replace(sparse=sparse)
    if output is None:
        values = ffn_layers.compare(changed, layer, y_bar)
        assert values["max_row_error"] < 2**-6
    else:
        with pytest.raises(DisagreementError, match=f"of {output} is off"):
            ffn_layers.compare(changed, layer, y_bar)


@pytest.mark.parametrize("pass_name", ["forward", "train"])
def test_a_row_is_written(tmp_path, pass_name):
    rows = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "benchmarks.ffn", "--backend=reference", f"--pass={pass_name}"]
    command += ["--tokens=64", "--hidden_size=64", "--intermediate_size=128", "--density=0.02,0.2"]
    command += ["--rounds=5", "--repeats=1", f"--output={rows}"]
    subprocess.run(command, check=True, capture_output=True)
    written = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["config"]["active"] for row in written] == [2.56, 25.6]
    for row in written:
        values = row["values"]
        assert values["ratio"] == values["dense_ms"]["median"] / values["sparse_ms"]["median"]
        assert set(values["row_errors"]) == set(
            ffn_layers.OUTPUTS[: 1 if pass_name == "forward" else 5]
        )
