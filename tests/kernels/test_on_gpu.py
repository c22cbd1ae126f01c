"""What only a GPU can show: real memory, real concurrency, the same bits run after run."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import matmul_pack, packed_ffn, reference, sparse_ffn, twell_matmul
from pallas_kernels.mosaic_gpu import ffn as mosaic_ffn
from pallas_kernels.triton_gpu import ffn as triton_ffn
from tests.kernels.backends import GPU_BACKENDS
from tests.kernels.cases import TABLE, Case, make_inputs
from tests.kernels.judge import assert_rows_close, run
from tests.kernels.truth import ffn_truth, naive_ffn, row_errors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPU_BACKENDS, reason="no GPU that a kernel serves"),
    pytest.mark.parametrize("backend", GPU_BACKENDS or ("none",)),
]

GPU_KERNELS = {
    "mosaic_gpu": mosaic_ffn.kernels(),
    "triton": triton_ffn.KERNELS,
    "mosaic_triton": triton_ffn.KERNELS_ON_HOPPER,
}

# Of all kernels' packing.
TILE, SLOTS = 128, 15

CASE = Case((1000,), 256, 1000, 0.005, "bfloat16")


def arguments(inputs):
    return inputs.x, inputs.w_gate, inputs.w_up, inputs.w_down


def layer(backend):
    return jax.jit(functools.partial(sparse_ffn, backend=backend))


def assert_close(y, expected):
    assert row_errors(y, np.asarray(expected, np.float32)).max() <= 2**-7


def test_counts_around_the_slots_in_one_tile(backend):
    """Rows with 0, 1, slots - 1, slots, slots + 1 and all neurons of a tile active, and dense."""
    tile, slots, neurons, width = TILE, SLOTS, 1000, 256
    rng = np.random.default_rng(0)
    counts = (0, 1, slots - 1, slots, slots + 1, tile, neurons)
    # With so many idle tokens around them the batch is sparse enough for the kernels.
    wanted = [*counts * 40, *[0] * 4800]
    gates = np.zeros((len(wanted), neurons), np.float32)
    for row, number in enumerate(wanted):
        first = 0 if number > tile else tile * rng.integers(neurons // tile)
        places = first + rng.permutation(max(number, tile))[:number]
        gates[row, places] = rng.integers(1, 9, number) / 8
    # x holds the gates, and the gate weights are the identity: relu(x Wg') is what we want.
    x = jnp.asarray(np.pad(gates, ((0, 0), (0, 24))), jnp.bfloat16)
    w_gate = jnp.eye(neurons, 1024, dtype=jnp.bfloat16)
    w_up, w_down = (
        jnp.asarray(rng.normal(size=(neurons, 1024)) / 32, jnp.bfloat16) for _ in range(2)
    )
    y, stats = layer(backend)(x, w_gate, w_up, w_down)
    expected_y, expected = layer("reference")(x, w_gate, w_up, w_down)
    np.testing.assert_array_equal(stats.fired, expected.fired)
    assert float(stats.l0) == float(expected.l0) == np.float32(np.mean(wanted))
    assert_close(y, expected_y)
    np.testing.assert_array_equal(np.asarray(y, np.float32)[np.asarray(wanted) == 0], 0)

    if backend == "mosaic_triton":  # has no matmuls of its own
        return
    twell = matmul_pack(x, w_gate, tile=tile, slots=slots, backend=backend)
    lost = np.asarray(wanted) > slots
    np.testing.assert_array_equal(twell.overflowed, lost)
    product = np.asarray(twell_matmul(twell, w_down[:, :width], backend=backend), np.float32)
    assert np.isnan(product[lost]).all()
    truth = gates[~lost].astype(np.float64) @ np.asarray(w_down[:, :width], np.float64)
    assert row_errors(product[~lost], truth).max() <= 2**-7


def by_kernels(backend):
    """The layer, with its kernels at densities at which it would be computed densely, too."""
    config = packed_ffn.FfnConfig(max_active_share=1.0)
    return packed_ffn.make_sparse_ffn(GPU_KERNELS[backend], config)


@pytest.mark.parametrize("dense_band", [0, 60])
@pytest.mark.parametrize(
    "case", [c for c in TABLE if c.dtype == "bfloat16" and not c.poison], ids=str
)
def test_the_case_table_by_kernels(backend, case, dense_band):
    """`test_sparse_ffn` has the table as it is dispatched: most of it is dense enough for XLA."""
    inputs = make_inputs(case)
    truth = ffn_truth(inputs)
    layer = functools.partial(by_kernels(backend), dense_band=dense_band)
    naive_y, _, naive_gradients = run(naive_ffn, inputs)
    y, stats = jax.jit(layer)(*arguments(inputs), inputs.token_mask)
    assert_rows_close("y", y, truth["y"], naive_y, case.intermediate_size)
    np.testing.assert_array_equal(stats.fired, truth["fired"])
    # Only tokens that lost entries were computed otherwise, and only as many as the pool holds.
    support = truth["support"][:, dense_band:]
    starts = range(0, support.shape[1], TILE)
    counts = np.add.reduceat(support.astype(int), starts, axis=1)
    lost = (counts > SLOTS).any(axis=1).sum()
    assert int(stats.num_dense) == (lost if lost <= 256 else len(support))
    for name, gradient in run(layer, inputs)[2].items():
        contraction = case.intermediate_size if name == "dx" else len(support)
        assert_rows_close(name, gradient, truth[name], naive_gradients[name], contraction)


@pytest.mark.parametrize("gated", [True, False])
def test_more_tokens_than_thread_blocks(backend, gated):
    """So many that every persistent block takes several, sparse enough that none is dense."""
    case = Case((20_000,), 256, 1000, 0.005, "bfloat16", gated=gated, mask="random")
    inputs = make_inputs(case)
    y, stats = jax.jit(by_kernels(backend))(*arguments(inputs), inputs.token_mask)
    expected_y, expected = jax.jit(reference.sparse_ffn)(*arguments(inputs), inputs.token_mask)
    assert int(stats.num_dense) <= 256
    np.testing.assert_array_equal(stats.fired, expected.fired)
    np.testing.assert_allclose(stats.l1, expected.l1, rtol=2**-8)
    assert_close(y, expected_y)


@pytest.mark.parametrize("neurons", [7, 128, 344])
def test_an_odd_number_of_tiles(backend, neurons):
    """Blocks of two tiles, of which one does not exist: it must not write to other rows."""
    rows, active = 1000, 3
    rng = np.random.default_rng(0)
    gates = np.zeros((rows, neurons), np.float32)
    gates[np.arange(rows)[:, None], rng.integers(0, neurons, (rows, active))] = 1
    x = jnp.asarray(np.pad(gates, ((0, 0), (0, 512 - neurons))), jnp.bfloat16)
    weights = (jnp.eye(neurons, 512, dtype=jnp.bfloat16),) * 3
    function = jax.jit(by_kernels(backend))
    # What another block writes, or does not, depends on timing.
    for _ in range(20):
        y, stats = function(x, *weights, None)
        np.testing.assert_array_equal(stats.fired, gates.sum(axis=0))
        np.testing.assert_allclose(stats.l0, gates.sum() / rows, rtol=2**-22)
        assert int(stats.num_dense) == 0
        np.testing.assert_array_equal(np.asarray(y, np.float32)[:, :neurons], gates)


def test_freed_memory_full_of_nan(backend):
    """What a kernel does not write, it must not read."""
    inputs = make_inputs(CASE)
    expected, _ = layer("reference")(*arguments(inputs))
    function = layer(backend).lower(*arguments(inputs)).compile()
    poison = jax.block_until_ready(jnp.full((2 << 30) // 4, jnp.nan, jnp.float32))
    del poison
    y, stats = function(*arguments(inputs))
    assert np.isfinite(np.asarray(y, np.float32)).all()
    assert np.isfinite(stats.l1)
    # A NaN that was read as a count would have sent the batch to the dense matmuls.
    assert int(stats.num_dense) == 0
    np.testing.assert_allclose(stats.l0 * len(y), np.sum(stats.fired), rtol=2**-20)
    assert_close(y, expected)


def test_ten_runs_are_bit_equal(backend):
    inputs = make_inputs(CASE)
    function = layer(backend)
    first = jax.device_get(function(*arguments(inputs)))
    for _ in range(9):
        jax.tree.map(
            np.testing.assert_array_equal, jax.device_get(function(*arguments(inputs))), first
        )


def test_two_layers_in_turn_in_one_program(backend):
    """No scratch memory or count of one call is left for the next one."""
    one, two = make_inputs(CASE, seed=0), make_inputs(CASE, seed=1)

    @functools.partial(jax.jit, static_argnums=2)
    def alternate(one, two, backend):
        results = []
        for _ in range(3):
            for parameters in (one, two):
                results.append(sparse_ffn(*parameters, backend=backend)[0])
        return results

    results = alternate(arguments(one), arguments(two), backend)
    expected = alternate(arguments(one), arguments(two), "reference")
    for number, (y, expected_y) in enumerate(zip(results, expected, strict=True)):
        assert_close(y, expected_y)
        np.testing.assert_array_equal(y, results[number % 2])


def test_calls_from_two_threads_interleaved(backend):
    inputs = [make_inputs(CASE, seed=seed) for seed in range(2)]
    function = layer(backend)
    expected = [jax.device_get(function(*arguments(i))) for i in inputs]
    failures = []

    def work(number):
        try:
            for _ in range(20):
                got = jax.device_get(function(*arguments(inputs[number])))
                jax.tree.map(np.testing.assert_array_equal, got, expected[number])
        except AssertionError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
