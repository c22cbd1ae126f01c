"""Bands of neurons: the same layer, less the silent ones."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import FfnPlan, sparse_ffn
from tests.kernels.backends import BACKENDS, with_backends
from tests.kernels.cases import Case, make_inputs
from tests.kernels.judge import assert_rows_close, run
from tests.kernels.truth import ffn_truth, naive_ffn

CASES = (
    Case((64,), 64, 344, 0.05, "bfloat16", mask="random"),
    Case((7,), 192, 344, 0.5, "bfloat16", gated=False),
    Case((3, 2), 64, 344, 0.005, "float32"),
)

BANDS = ((0, 0), (100, 0), (344, 0), (0, 343), (60, 130), (214, 130))
PLANS = tuple(FfnPlan(*bands) for bands in BANDS)


def with_plan(plan, backend):
    return lambda x, w_gate, w_up, w_down, token_mask: sparse_ffn(
        x, w_gate, w_up, w_down, token_mask=token_mask, backend=backend, plan=plan
    )


def closed(inputs, num_neurons):
    """The layer whose last `num_neurons` gates are closed: their products are 0."""
    first = "w_gate" if inputs.w_gate is not None else "w_up"
    weight = getattr(inputs, first)
    return dataclasses.replace(inputs, **{first: weight.at[len(weight) - num_neurons :].set(0)})


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize(("case", "backend"), with_backends(CASES))
def test_a_plan_is_the_layer_without_silent_neurons(case, backend, plan):
    inputs = make_inputs(case)
    truth = ffn_truth(closed(inputs, plan.silent_band))
    y, stats, gradients = run(with_plan(plan, backend), inputs)
    naive_y, _, naive_gradients = run(naive_ffn, closed(inputs, plan.silent_band))
    kept = case.intermediate_size - plan.silent_band
    assert_rows_close("y", y, truth["y"], naive_y, kept)
    np.testing.assert_array_equal(stats.fired, truth["fired"])
    np.testing.assert_allclose(stats.l0, truth["l0"], rtol=32 * 2**-24)
    eps = float(jnp.finfo(case.dtype).eps)
    np.testing.assert_allclose(stats.l1, truth["l1"], rtol=max(2 * eps, 32 * 2**-24))
    for name, gradient in gradients.items():
        contraction = kept if name == "dx" else int(np.prod(case.tokens))
        assert_rows_close(name, gradient, truth[name], naive_gradients[name], contraction)
        if name != "dx":
            assert np.all(np.asarray(gradient)[kept:] == 0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "plan", [FfnPlan(-1), FfnPlan(0, -1), FfnPlan(345), FfnPlan(300, 45), FfnPlan(0, 344)], ids=str
)
def test_a_plan_that_does_not_fit_is_refused(plan, backend):
    inputs = make_inputs(CASES[0])
    arguments = (inputs.x, inputs.w_gate, inputs.w_up, inputs.w_down)
    with pytest.raises(ValueError, match="plan: "):
        sparse_ffn(*arguments, plan=plan, backend=backend)
