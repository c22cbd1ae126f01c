"""The Mosaic GPU kernels without a GPU: lowered for CUDA, and refused on a CPU.

`test_interpreted` runs them.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import pack
from pallas_kernels.mosaic_gpu import ffn, gate, matmuls


@pytest.mark.parametrize(
    ("rows", "width", "neurons"),
    [(1, 64, 9), (257, 2048, 5632), (4096, 4096, 14336), (9, 576, 65536)],
)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("has_band", [True, False])
def test_lowers_for_cuda(rows, width, neurons, gated, has_band):
    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    weight = array(neurons, width)
    function = functools.partial(ffn.sparse_ffn, dense_band=neurons // 8 if has_band else 0)
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
