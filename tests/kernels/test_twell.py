"""The TwELL format and the packed matmuls: invariants, overflow, NaN, gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import matmul_pack, pack, twell_matmul, unpack
from tests.kernels.backends import F32_BACKENDS, PACKING_BACKENDS, with_backends
from tests.kernels.cases import TABLE, Case, make_inputs
from tests.kernels.truth import row_errors

MATMUL_CASES = [case for case in TABLE if case.gated and case.mask == "none"]

# Tiles, and slots to choose from, that a backend packs.
TILES = {
    "reference": (96, range(1, 97)),
    "mosaic_gpu": (128, range(3, 64, 4)),
    "triton": (64, range(1, 65)),
}


@st.composite
def sparse_matrices(draw):
    """(matrix, tile, slots): any density, signs, NaN and inf, and a tile that need not divide."""
    rows, columns = draw(st.integers(0, 6)), draw(st.integers(1, 40))
    tile = draw(st.integers(1, 48))
    slots = draw(st.integers(1, tile))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    matrix = rng.normal(size=(rows, columns))
    matrix *= rng.random((rows, columns)) < draw(st.sampled_from([0.0, 0.05, 0.5, 1.0]))
    if draw(st.booleans()) and matrix.size:
        matrix.flat[rng.integers(matrix.size)] = draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    return jnp.asarray(matrix, dtype), tile, slots


# A new shape compiles anew, which takes longer than hypothesis's usual deadline.
@settings(deadline=None, max_examples=40)
@given(sparse_matrices())
def test_format_invariants(drawn):
    dense, tile, slots = drawn
    twell = pack(dense, tile=tile, slots=slots)
    values = np.asarray(dense, np.float32)
    rows, columns = values.shape
    assert twell.shape == dense.shape and twell.dtype == dense.dtype
    overflowed = np.zeros(rows, bool)
    for row in range(rows):
        for t in range(twell.num_tiles):
            piece = values[row, t * tile : (t + 1) * tile]
            active = t * tile + np.flatnonzero(piece != 0)
            kept = active[:slots]
            assert int(twell.count[row, t]) == len(active)
            overflowed[row] |= len(active) > slots
            index = np.asarray(twell.index[row, t])
            np.testing.assert_array_equal(index[: len(kept)], kept)
            np.testing.assert_array_equal(index[len(kept) :], columns)
            value = np.asarray(twell.value[row, t], np.float32)
            np.testing.assert_array_equal(value[: len(kept)], values[row, kept])
            np.testing.assert_array_equal(value[len(kept) :], 0)
    np.testing.assert_array_equal(twell.overflowed, overflowed)
    assert bool(twell.exact) == (not overflowed.any())
    expected = np.where(overflowed[:, None], np.nan, values)
    np.testing.assert_array_equal(np.asarray(unpack(twell), np.float32), expected)


@pytest.mark.parametrize(("case", "backend"), with_backends(MATMUL_CASES, PACKING_BACKENDS))
def test_matmul_pack_and_twell_matmul(case, backend):
    """With room for every entry both matmuls equal the dense ones, NaN and inf included."""
    inputs = make_inputs(case)
    # Room for all that any row has, and no more than the case's density asks for.
    tile, choices = TILES[backend]
    busiest = pack(jax.nn.relu(inputs.x @ inputs.w_gate.T), tile=tile, slots=1).count.max(initial=1)
    slots = next((slots for slots in choices if slots >= busiest), None)
    if slots is None:
        pytest.skip(f"{busiest} active neurons in a tile; {backend} packs at most {choices[-1]}")
    twell = matmul_pack(inputs.x, inputs.w_gate, tile=tile, slots=slots, backend=backend)
    assert bool(twell.exact)
    x = np.asarray(inputs.x.astype(jnp.float32), np.float64)
    w_gate, w_down = (
        np.asarray(w.astype(jnp.float32), np.float64) for w in (inputs.w_gate, inputs.w_down)
    )
    with np.errstate(invalid="ignore"):
        gate = np.maximum(x @ w_gate.T, 0)
    rounded = jnp.asarray(gate, jnp.float32).astype(case.dtype)
    # Gates are exact in f32, so the packed values are equal to the bit.
    np.testing.assert_array_equal(
        np.asarray(unpack(twell), np.float32), np.asarray(rounded, np.float32)
    )
    np.testing.assert_array_equal(twell.count.sum(axis=-1), (gate != 0).sum(axis=-1))

    y = twell_matmul(twell, inputs.w_down, backend=backend)
    y = np.asarray(y, np.float32).reshape(-1, case.hidden_size)
    healthy = np.arange(len(y)) != inputs.poisoned
    with np.errstate(invalid="ignore"):
        truth = (np.asarray(rounded, np.float64) @ w_down).reshape(y.shape)
    if inputs.poisoned is not None:
        assert not np.isfinite(y[inputs.poisoned]).any()
    # One rounding of the result, and the random walk of an f32 sum over H.
    limit = float(jnp.finfo(case.dtype).eps) + np.sqrt(case.intermediate_size) * 2**-23
    assert row_errors(y[healthy], truth[healthy]).max(initial=0.0) <= limit


@pytest.mark.parametrize("backend", F32_BACKENDS)
def test_overflow_is_nan_in_its_row_only(backend):
    tile, slots, hidden = 16, 4, 64
    active = [0, 1, slots - 1, slots, slots + 1, tile]  # in one tile of each row
    dense = np.zeros((len(active), hidden), np.float32)
    for row, number in enumerate(active):
        dense[row, tile : tile + number] = 1 + np.arange(number)
    # relu(x w') with w the identity packs exactly `dense`.
    twell = matmul_pack(
        jnp.asarray(dense), jnp.eye(hidden), tile=tile, slots=slots, backend=backend
    )
    np.testing.assert_array_equal(twell.count[:, 1], active)
    w = jnp.asarray(np.random.default_rng(0).normal(size=(hidden, 24)), jnp.float32)
    y = np.asarray(twell_matmul(twell, w, backend=backend))
    lost = np.asarray(active) > slots
    assert not bool(twell.exact)
    assert np.isnan(y[lost]).all()
    np.testing.assert_allclose(y[~lost], (dense @ w)[~lost], rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(y[0], 0)

    def loss(x, w):
        twell = matmul_pack(x, jnp.eye(hidden), tile=tile, slots=slots, backend=backend)
        return jnp.sum(twell_matmul(twell, w, backend=backend)[~lost])

    dx, dw = jax.grad(loss, argnums=(0, 1))(jnp.asarray(dense), w)
    assert np.isnan(dx[lost]).all() and np.isfinite(dx[~lost]).all()
    assert np.isnan(dw).all()


@pytest.mark.parametrize("backend", F32_BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_equal_autodiff(backend, dtype):
    inputs = make_inputs(Case((3, 11), 64, 344, 0.2, dtype))

    def packed(x, w, w_down):
        twell = matmul_pack(x, w, tile=64, slots=64, backend=backend)
        return twell_matmul(twell, w_down, backend=backend)

    def naive(x, w, w_down):
        return jax.nn.relu(x @ w.T) @ w_down

    arguments = (inputs.x, inputs.w_gate, inputs.w_down)
    _, packed_vjp = jax.vjp(packed, *arguments)
    _, naive_vjp = jax.vjp(naive, *arguments)
    wide = [a.astype(jnp.float32) for a in arguments]
    _, wide_vjp = jax.vjp(naive, *wide)
    truths = wide_vjp(inputs.y_bar.astype(jnp.float32))
    for gradient, same_precision, truth in zip(
        packed_vjp(inputs.y_bar), naive_vjp(inputs.y_bar), truths, strict=True
    ):
        limit = max(2 * row_errors(same_precision, truth).max(), np.sqrt(344) * 2**-23)
        assert row_errors(gradient, truth).max() <= limit


def test_pack_is_differentiable():
    dense = jnp.asarray([[0.0, 2.0, 0.0, -3.0, 1.0], [1.0, 1.0, 0.0, 0.0, 0.0]])
    gradient = jax.grad(lambda d: jnp.sum(unpack(pack(d, tile=2, slots=2)) ** 2))(dense)
    np.testing.assert_array_equal(gradient, 2 * dense)


def test_gradients_of_lost_entries_are_nan():
    """Of pack, of unpack, and of both: NaN in the row that overflowed, right in the other."""
    dense = jnp.asarray([[0.0, 2.0, 0.0, -3.0, 1.0], [1.0, 1.0, 0.0, 0.0, 0.0]])
    through_both = jax.grad(lambda d: unpack(pack(d, tile=2, slots=1))[0].sum())(dense)
    of_pack = jax.grad(lambda d: pack(d, tile=2, slots=1).value[0].sum())(dense)
    for gradient in (through_both, of_pack):
        np.testing.assert_array_equal(gradient[0], dense[0] != 0)
        assert np.isnan(gradient[1]).all()
    twell = pack(dense, tile=2, slots=1)

    def of_values(value):
        return unpack(dataclasses.replace(twell, value=value))[0].sum()

    value_bar = jax.grad(of_values)(twell.value)
    np.testing.assert_array_equal(value_bar[0, :, 0], [1, 1, 1])
    assert np.isnan(value_bar[1, 0]).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pack(jnp.zeros((2, 8)), tile=0, slots=1), "tile: must be at least 1"),
        (lambda: pack(jnp.zeros((2, 8)), tile=4, slots=5), "slots: must be from 1 to tile = 4"),
        (lambda: pack(jnp.zeros((2, 8), int), tile=4, slots=4), "dense: dtype must be"),
        (
            lambda: matmul_pack(jnp.zeros((2, 8)), jnp.zeros((4, 7)), tile=4, slots=4),
            "w: has 7 columns",
        ),
        (
            lambda: twell_matmul(pack(jnp.zeros((2, 8)), tile=4, slots=4), jnp.zeros((7, 3))),
            r"w: has 7 neurons \(rows\), twell has 8",
        ),
    ],
)
def test_wrong_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
