"""The Mosaic GPU kernels without a GPU: interpreted with race detection, and lowered for CUDA.

The case table runs them on a Hopper GPU (`test_sparse_ffn`, `test_twell`).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import pack, packed_ffn, packed_matmuls, reference, words
from pallas_kernels.mosaic_gpu import consumer, device, ffn, gate, matmuls
from tests.kernels.cases import Case, make_inputs
from tests.kernels.truth import row_errors

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


@pytest.fixture(autouse=True)
def two_multiprocessors(monkeypatch):
    """So that a thread block of the interpreted kernels has several tiles or tokens."""
    monkeypatch.setattr(gate, "num_sms", lambda: 2)
    monkeypatch.setattr(consumer, "num_sms", lambda: 2)
    yield
    # Newer versions of JAX raise by themselves; 0.11 only keeps a note, which has no public name.
    races = gpu_callbacks._races
    assert races is None or not races.races_found


def bf16(rng, *shape):
    return jnp.asarray(np.round(rng.normal(size=shape) * 8) / 8, jnp.bfloat16)


@pytest.mark.parametrize(
    ("rows", "neurons", "slots", "races"),
    [(130, 344, 15, False), (1, 128, 15, True), (9, 7, 3, True)],
)
def test_packing_matmul(rows, neurons, slots, races):
    """Words and firing counts against the reference: overflow, NaN, a mask, edges of tiles."""
    rng = np.random.default_rng(0)
    x, w = bf16(rng, rows, 64), bf16(rng, neurons, 64)
    x, w = x.at[:, 0].set(4), w.at[:, 0].set(-3)
    x = x.at[rows // 2, 5].set(jnp.nan)
    mask = jnp.asarray(rng.random(rows) < 0.7)
    packed, fired = gate.gate_words(
        x,
        w,
        mask,
        config=gate.GateConfig(slots=slots),
        interpret=plgpu.InterpretGPUParams(detect_races=races),
    )
    twell = words.to_twell(packed, num_neurons=neurons, tile=gate.TILE)
    gates = jax.nn.relu(jnp.einsum("md,hd->mh", x, w, preferred_element_type=jnp.float32))
    gates = gates.astype(jnp.bfloat16)
    expected = pack(gates, tile=gate.TILE, slots=slots)
    np.testing.assert_array_equal(twell.count, expected.count)
    assert (np.asarray(twell.count).max() > slots) and (rows == 1 or not expected.exact)
    np.testing.assert_array_equal(fired, jnp.sum((gates != 0) & mask[:, None], axis=0))
    # A tile that overflowed keeps others of its entries than the reference does.
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


@pytest.mark.parametrize(("pool_rows", "max_active_share"), [(4, 1.0), (16, 0.01)])
@pytest.mark.parametrize("case", FFN_CASES, ids=str)
def test_layer(case, pool_rows, max_active_share):
    """By kernels, with some tokens in the pool, and all dense: equal to the last bit.

    Products of numbers on a grid are exact, and so few that any order gives the same sum.
    """
    inputs = make_inputs(case)
    arguments = (inputs.x, inputs.w_gate, inputs.w_up, inputs.w_down, inputs.token_mask)
    config = packed_ffn.FfnConfig(pool_rows=pool_rows, max_active_share=max_active_share)
    y, stats = packed_ffn.forward(*arguments, kernels=ffn.kernels(INTERPRET), config=config)
    expected_y, expected = reference.sparse_ffn(*arguments)
    np.testing.assert_array_equal(stats.fired, expected.fired)
    for name in ("l0", "num_tokens"):
        np.testing.assert_array_equal(getattr(stats, name), getattr(expected, name))
    np.testing.assert_allclose(stats.l1, expected.l1, rtol=2**-8)
    twell = reference.matmul_pack(
        inputs.x, inputs.w_up if inputs.w_gate is None else inputs.w_gate, 128, 15
    )
    num_dense = int(twell.overflowed.sum())
    share = float(twell.count.sum()) / twell.overflowed.size / case.intermediate_size
    if num_dense > min(pool_rows, twell.overflowed.size) or share > max_active_share:
        num_dense = twell.overflowed.size
    assert int(stats.num_dense) == num_dense
    y, expected_y = (
        np.asarray(a, np.float32).reshape(-1, case.hidden_size) for a in (y, expected_y)
    )
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected_y))
    scale = np.nanmax(np.abs(expected_y), initial=0)
    assert np.nanmax(np.abs(y - expected_y), initial=0) <= 2**-8 * scale


def test_packed_matmuls():
    rng = np.random.default_rng(0)
    x, w, down = bf16(rng, 2, 3, 64), bf16(rng, 344, 64), bf16(rng, 344, 192)
    x, w = x.at[..., 0].set(4), w.at[:, 0].set(-3)
    matmul_pack = packed_matmuls.make_matmul_pack(
        functools.partial(matmuls.packed, interpret=INTERPRET)
    )
    twell_matmul = packed_matmuls.make_twell_matmul(
        functools.partial(matmuls.multiplied, interpret=INTERPRET)
    )
    twell = matmul_pack(x, w, 128, 31)
    expected = reference.matmul_pack(x, w, 128, 31)
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
    lossy = pack(reference.unpack(expected), tile=128, slots=8)
    assert 0 < int(lossy.overflowed.sum()) <= 6
    y = twell_matmul(lossy, down)
    np.testing.assert_array_equal(np.isnan(y).all(axis=-1), lossy.overflowed)


def test_a_map_is_a_loop(monkeypatch):
    """vmap of the operations as they are registered, with the kernels interpreted."""
    monkeypatch.setattr(
        packed_ffn, "FfnConfig", functools.partial(packed_ffn.FfnConfig, max_active_share=1.0)
    )
    sparse_ffn = packed_ffn.make_sparse_ffn(ffn.kernels(INTERPRET))
    inputs = make_inputs(Case((2, 3), 64, 128, 0.1, "bfloat16"))
    weights = (inputs.w_gate, inputs.w_up, inputs.w_down)
    y, stats = jax.vmap(lambda x: sparse_ffn(x, *weights, None))(inputs.x)
    expected_y, expected = jax.vmap(lambda x: reference.sparse_ffn(x, *weights, None))(inputs.x)
    np.testing.assert_array_equal(stats.fired, expected.fired)
    assert row_errors(y, np.asarray(expected_y, np.float32)).max() <= 2**-8


@pytest.mark.parametrize(
    ("rows", "width", "neurons"),
    [(1, 64, 7), (257, 2048, 5632), (4096, 4096, 14336), (9, 576, 65536)],
)
@pytest.mark.parametrize("gated", [True, False])
def test_lowers_for_cuda(rows, width, neurons, gated):
    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    weight = array(neurons, width)
    function = ffn.sparse_ffn
    lowered = (
        jax.jit(function)
        .trace(array(rows, width), weight if gated else None, weight, weight, None)
        .lower(lowering_platforms=("cuda",))
    )
    assert lowered.as_text().count("mosaic_gpu") >= 2


def test_what_is_not_served_is_refused(monkeypatch):
    """By name of the GPU, then by shape: never by an error from inside a compilation."""
    x, w = jnp.zeros((2, 64), jnp.bfloat16), jnp.zeros((128, 64), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=r"needs a Hopper GPU .* found cpu"):
        ffn.check_sparse_ffn(x, w, w, w, None)
    for module in (ffn, matmuls):
        monkeypatch.setattr(module, "require_hopper", lambda: None)
    ffn.check_sparse_ffn(x, w, w, w, None)
    for wrong_x, wrong_w, message in (
        (x.astype(jnp.float32), w, "serves bfloat16, got float32"),
        (x[:, :60], w[:, :60], "multiple of 64 up to 8192, got 60"),
        (x[:0], w, "needs at least one token"),
        (x, jnp.zeros((65537, 64), jnp.bfloat16), "up to 65536 neurons, got 65537"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            ffn.check_sparse_ffn(wrong_x, wrong_w, wrong_w, wrong_w, None)
    for tile, slots, message in ((64, 15, "tiles of 128, got 64"), (128, 16, "slots, got 16")):
        with pytest.raises(NotImplementedError, match=message):
            matmuls.check_matmul_pack(x, w, tile, slots)
    with pytest.raises(ValueError, match="slots: must be 3, 7"):
        gate.GateConfig(slots=16)
    many_tiles = jax.eval_shape(lambda: pack(jnp.zeros((1, 65536), jnp.bfloat16), tile=4, slots=4))
    with pytest.raises(NotImplementedError, match="cannot hold a row of 16384 tiles"):
        matmuls.check_twell_matmul(many_tiles, jnp.zeros((65536, 64), jnp.bfloat16))


def test_outputs_vary_where_operands_do():
    """So that the kernels can stand in a `jax.shard_map`."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def on_device(x):
        kind = device.output((2,), jnp.float32, jnp.zeros(2), x)
        assert kind.manual_axis_type.varying == {"data"}
        return x

    with jax.set_mesh(mesh):
        jax.shard_map(
            on_device,
            in_specs=jax.sharding.PartitionSpec("data"),
            out_specs=jax.sharding.PartitionSpec("data"),
        )(jnp.zeros(2))
