"""The kernels without a GPU, interpreted: those of Mosaic GPU with race detection, and Triton's.

The case table runs them on a GPU (`test_sparse_ffn`, `test_twell`, `test_on_gpu`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import pack, packed_ffn, packed_matmuls, reference, words
from pallas_kernels.mosaic_gpu import consumer, gate
from pallas_kernels.mosaic_gpu import ffn as mosaic_ffn
from pallas_kernels.mosaic_gpu import matmuls as mosaic_matmuls
from pallas_kernels.triton_gpu import backward, launch
from pallas_kernels.triton_gpu import ffn as triton_ffn
from pallas_kernels.triton_gpu import matmuls as triton_matmuls
from tests.kernels.cases import Case, make_inputs
from tests.kernels.judge import GRADIENTS, assert_rows_close, run
from tests.kernels.truth import ffn_truth, naive_ffn, row_errors

TILE = 128


class Interpreted(NamedTuple):
    """What is tested of a backend; `pack_words` is `(x, w, mask, slots, races)`."""

    pack_words: Callable
    kernels: packed_ffn.Kernels
    packed: Callable
    multiplied: Callable


def _mosaic_words(x, w, mask, slots, races):
    config, parameters = gate.GateConfig(slots=slots), plgpu.InterpretGPUParams(detect_races=races)
    return gate.gate_words(x, w, mask, config=config, interpret=parameters)


def _triton_words(x, w, mask, slots, _):
    return launch.pack_words(x, w, mask, config=launch.PackConfig(tile=TILE, slots=slots))


INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
BACKENDS = {
    "mosaic_gpu": Interpreted(
        _mosaic_words,
        mosaic_ffn.kernels(INTERPRET),
        functools.partial(mosaic_matmuls.packed, interpret=INTERPRET),
        functools.partial(mosaic_matmuls.multiplied, interpret=INTERPRET),
    ),
    "triton": Interpreted(
        _triton_words, triton_ffn.KERNELS, triton_matmuls.packed, triton_matmuls.multiplied
    ),
}


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    if request.param == "triton":
        # The interpreter of 3.6 fails with numpy 2.4.
        pytest.importorskip("triton", minversion="3.7")
        if jax.default_backend() == "gpu":
            pytest.skip("Triton is not asked to interpret where it can run")
        from tests.kernels import triton_interpreted

        for module in (launch, backward):
            monkeypatch.setattr(module, "call", triton_interpreted.call)
    # So that a thread block has several tiles or tokens.
    monkeypatch.setattr(gate, "num_sms", lambda: 2)
    monkeypatch.setattr(consumer, "num_sms", lambda: 2)
    yield BACKENDS[request.param]
    # Newer versions of JAX raise by themselves; 0.11 only keeps a note, which has no public name.
    races = gpu_callbacks._races
    assert races is None or not races.races_found


def bf16(rng, *shape):
    return jnp.asarray(np.round(rng.normal(size=shape) * 8) / 8, jnp.bfloat16)


@pytest.mark.parametrize(
    ("rows", "neurons", "slots", "races"),
    # The last one gives a thread block several tiles, one after the other.
    [(130, 344, 15, False), (1, 128, 15, True), (9, 7, 3, True), (9, 600, 15, True)],
)
def test_packing_matmul(backend, rows, neurons, slots, races, monkeypatch):
    """Words and firing counts against the reference: overflow, NaN, a mask, edges of tiles."""
    monkeypatch.setattr(gate, "num_sms", lambda: 2 if rows > 9 else 1)
    rng = np.random.default_rng(0)
    x, w = bf16(rng, rows, 64), bf16(rng, neurons, 64)
    x, w = x.at[:, 0].set(4), w.at[:, 0].set(-3)
    x = x.at[rows // 2, 5].set(jnp.nan)
    mask = jnp.asarray(rng.random(rows) < 0.7)
    packed, fired = backend.pack_words(x, w, mask, slots, races)
    twell = words.to_twell(packed, num_neurons=neurons, tile=TILE)
    gates = jax.nn.relu(jnp.einsum("md,hd->mh", x, w, preferred_element_type=jnp.float32))
    gates = gates.astype(jnp.bfloat16)
    expected = pack(gates, tile=TILE, slots=slots)
    np.testing.assert_array_equal(twell.count, expected.count)
    assert (np.asarray(twell.count).max() > slots) and (rows == 1 or not expected.exact)
    np.testing.assert_array_equal(fired, jnp.sum((gates != 0) & mask[:, None], axis=0))
    # A tile that overflowed may keep others of its entries than the reference does.
    whole = np.asarray(expected.count) <= slots
    for name in ("index", "value"):
        np.testing.assert_array_equal(
            np.asarray(getattr(twell, name), np.float32)[whole],
            np.asarray(getattr(expected, name), np.float32)[whole],
        )


FFN_CASES = (
    Case((7,), 64, 344, 0.05, "bfloat16"),
    Case((9,), 64, 344, 0.3, "bfloat16", gated=False, mask="random"),
    Case((3, 2), 256, 128, 0.05, "bfloat16", poison="nan"),
    Case((7,), 64, 344, 0.0, "bfloat16"),
    Case((7,), 192, 344, 1.0, "bfloat16"),
)


GRADIENT_CASES = (
    Case((7,), 64, 344, 0.05, "bfloat16"),
    Case((130,), 64, 128, 0.04, "bfloat16", mask="random"),
    Case((3, 4), 192, 344, 0.05, "bfloat16", gated=False, mask="random"),
    Case((7,), 64, 344, 0.0, "bfloat16"),
    Case((7,), 192, 128, 1.0, "bfloat16"),
)


@pytest.mark.parametrize(
    ("pool_rows", "max_active_share", "dense_band"),
    [(4, 1.0, 0), (16, 0.01, 0), (4, 1.0, 60), (16, 0.01, 60)],
)
@pytest.mark.parametrize("case", FFN_CASES, ids=str)
def test_layer(backend, case, pool_rows, max_active_share, dense_band):
    """By kernels, with some tokens in the pool, and all dense; the same behind a dense band."""
    inputs = make_inputs(case)
    arguments = (inputs.x, inputs.w_gate, inputs.w_up, inputs.w_down, inputs.token_mask)
    config = packed_ffn.FfnConfig(pool_rows=pool_rows, max_active_share=max_active_share)
    (y, stats), _ = packed_ffn.forward(
        *arguments, kernels=backend.kernels, config=config, dense_band=dense_band
    )
    expected_y, expected = reference.sparse_ffn(*arguments)
    np.testing.assert_array_equal(stats.fired, expected.fired)
    np.testing.assert_array_equal(stats.num_tokens, expected.num_tokens)
    # A mean over both bands is the sum of two.
    np.testing.assert_allclose(stats.l0, expected.l0, rtol=2**-22 if dense_band else 0)
    np.testing.assert_allclose(stats.l1, expected.l1, rtol=2**-8)
    packed = inputs.w_up if inputs.w_gate is None else inputs.w_gate
    twell = reference.matmul_pack(inputs.x, packed[dense_band:], TILE, 15)
    num_dense = int(twell.overflowed.sum())
    share = float(twell.count.sum()) / twell.overflowed.size / twell.num_columns
    if num_dense > min(pool_rows, twell.overflowed.size) or share > max_active_share:
        num_dense = twell.overflowed.size
    assert int(stats.num_dense) == num_dense
    y, expected_y = (
        np.asarray(a, np.float32).reshape(-1, case.hidden_size) for a in (y, expected_y)
    )
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected_y))
    scale = np.nanmax(np.abs(expected_y), initial=0)
    # One rounding; a second one between the bands.
    roundings = 2 if dense_band else 1
    assert np.nanmax(np.abs(y - expected_y), initial=0) <= roundings * 2**-8 * scale


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
@pytest.mark.parametrize(
    ("pool_rows", "max_active_share", "dense_band"),
    [(4, 1.0, 0), (16, 1.0, 0), (16, 0.01, 0), (16, 1.0, 60), (16, 0.01, 60)],
)
@pytest.mark.parametrize("case", GRADIENT_CASES, ids=str)
def test_gradients(backend, case, pool_rows, max_active_share, dense_band, monkeypatch):
    """Every gradient by kernels, with some tokens in the pool, and all dense; with a dense band."""
    # Some lists have several segments then.
    monkeypatch.setattr(backward, "SEGMENT", 4)
    inputs = make_inputs(case)
    config = packed_ffn.FfnConfig(pool_rows=pool_rows, max_active_share=max_active_share)
    layer = packed_ffn.make_sparse_ffn(backend.kernels, config)
    truth = ffn_truth(inputs)
    _, _, gradients = run(functools.partial(layer, dense_band=dense_band), inputs)
    _, _, expected = run(naive_ffn, inputs)
    assert set(gradients) == {name for name in GRADIENTS if name in truth}
    for name, gradient in gradients.items():
        assert gradient.dtype == inputs.x.dtype
        contraction = case.intermediate_size if name == "dx" else int(np.prod(case.tokens))
        assert_rows_close(name, gradient, truth[name], expected[name], contraction)


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
def test_lists_by_neuron(backend):
    """Every pair once, tokens in order; more tokens than one count of marks is kept for."""
    del backend
    rows, neurons = 300, 40
    rng = np.random.default_rng(0)
    active = rng.random((rows, neurons)) < 0.1
    active[:, 3] = True
    active[7] = False
    offsets = np.concatenate([[0], np.cumsum(active.sum(axis=1))]).astype(np.int32)
    token, neuron = np.nonzero(active)
    entries = np.zeros(len(token) + 50, np.int32)
    entries[: len(token)] = neuron | (1 << 20)
    lists = launch.Lists(jnp.asarray(entries), jnp.asarray(offsets))
    places, tokens, by_neuron = map(np.asarray, backward.regroup(lists, neurons))
    expected_neuron, expected_token = np.nonzero(active.T)
    np.testing.assert_array_equal(by_neuron, np.searchsorted(expected_neuron, range(neurons + 1)))
    np.testing.assert_array_equal(tokens[: len(token)], expected_token)
    np.testing.assert_array_equal(expected_token[places[: len(token)]], token)
    np.testing.assert_array_equal(expected_neuron[places[: len(token)]], neuron)


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
@pytest.mark.parametrize(("y_scale", "l1_scale"), [(1e-6, 1.0), (1e3, 1e-6), (0.0, 1.0)])
def test_cotangents_of_different_size(backend, y_scale, l1_scale):
    """The L1 gradient alone, too, and twice the same bits."""
    case = Case((9,), 64, 128, 0.04, "bfloat16")
    inputs = make_inputs(case)
    y_bar = (inputs.y_bar * y_scale).astype(inputs.y_bar.dtype)
    inputs = dataclasses.replace(inputs, y_bar=y_bar, l1_bar=inputs.l1_bar * l1_scale)
    config = packed_ffn.FfnConfig(max_active_share=1.0)
    layer = packed_ffn.make_sparse_ffn(backend.kernels, config)
    truth = ffn_truth(inputs)
    _, _, gradients = run(layer, inputs)
    _, _, expected = run(naive_ffn, inputs)
    for name, gradient in gradients.items():
        contraction = case.intermediate_size if name == "dx" else 9
        assert_rows_close(name, gradient, truth[name], expected[name], contraction)
    jax.tree.map(np.testing.assert_array_equal, run(layer, inputs)[2], gradients)


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
@pytest.mark.parametrize("dense_band", [0, 32])
def test_a_policy_keeps_the_lists(backend, dense_band):
    """Under jax.checkpoint neither the gate nor the packing runs again."""
    config = packed_ffn.FfnConfig(max_active_share=1.0)
    layer = packed_ffn.make_sparse_ffn(backend.kernels, config)
    inputs = make_inputs(Case((5,), 64, 128, 0.05, "bfloat16"))

    def loss(x):
        weights = (inputs.w_gate, inputs.w_up, inputs.w_down)
        return jnp.sum(layer(x, *weights, None, dense_band=dense_band)[0])

    def calls_in(jaxpr):
        here = sum(eqn.primitive.name == "pure_callback" for eqn in jaxpr.eqns)
        parts = [part for eqn in jaxpr.eqns for part in jax.tree.leaves(list(eqn.params.values()))]
        inner = [getattr(part, "jaxpr", part) for part in parts]
        return here + sum(calls_in(part) for part in inner if hasattr(part, "eqns"))

    def kernel_calls(function):
        return calls_in(jax.make_jaxpr(jax.grad(function))(inputs.x).jaxpr)

    policy = jax.checkpoint_policies.save_only_these_names("ffn_lists")
    assert kernel_calls(jax.checkpoint(loss, policy=policy)) == kernel_calls(loss)
    assert kernel_calls(jax.checkpoint(loss)) > kernel_calls(loss)


def test_packed_matmuls(backend):
    rng = np.random.default_rng(0)
    x, w, down = bf16(rng, 2, 3, 64), bf16(rng, 344, 64), bf16(rng, 344, 192)
    x, w = x.at[..., 0].set(4), w.at[:, 0].set(-3)
    matmul_pack = packed_matmuls.make_matmul_pack(backend.packed)
    twell_matmul = packed_matmuls.make_twell_matmul(backend.multiplied)
    twell = matmul_pack(x, w, TILE, 31)
    expected = reference.matmul_pack(x, w, TILE, 31)
    jax.tree.map(np.testing.assert_array_equal, twell, expected)
    # Also of a Twell that no kernel could have made: other tiles and slots.
    other = pack(reference.unpack(expected), tile=50, slots=17)
    for packed in (twell, other):
        y = twell_matmul(packed, down)
        np.testing.assert_allclose(
            np.asarray(y, np.float32),
            np.asarray(reference.twell_matmul(packed, down), np.float32),
            rtol=2**-7,
            atol=2**-5,
        )
    lossy = pack(reference.unpack(expected), tile=TILE, slots=8)
    assert 0 < int(lossy.overflowed.sum()) <= 6
    y = twell_matmul(lossy, down)
    np.testing.assert_array_equal(np.isnan(y).all(axis=-1), lossy.overflowed)


def test_a_map_is_a_loop(backend):
    """vmap of the operations as they are registered."""
    config = packed_ffn.FfnConfig(max_active_share=1.0)
    sparse_ffn = packed_ffn.make_sparse_ffn(backend.kernels, config)
    inputs = make_inputs(Case((2, 3), 64, 128, 0.1, "bfloat16"))
    weights = (inputs.w_gate, inputs.w_up, inputs.w_down)
    y, stats = jax.vmap(lambda x: sparse_ffn(x, *weights, None))(inputs.x)
    expected_y, expected = jax.vmap(lambda x: reference.sparse_ffn(x, *weights, None))(inputs.x)
    np.testing.assert_array_equal(stats.fired, expected.fired)
    assert row_errors(y, np.asarray(expected_y, np.float32)).max() <= 2**-8
