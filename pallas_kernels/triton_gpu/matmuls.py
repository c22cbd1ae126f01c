"""`matmul_pack` and `twell_matmul` by Triton kernels, with the gradients of the reference."""

import math

import jax
import jax.numpy as jnp

from pallas_kernels.packed_matmuls import make_matmul_pack, make_twell_matmul
from pallas_kernels.shapes import check_weights
from pallas_kernels.triton_gpu import launch
from pallas_kernels.triton_gpu.device import require_triton
from pallas_kernels.twell import Twell
from pallas_kernels.words import from_twell, to_twell

# Powers of two that are a block of a matmul.
TILES = (32, 64, 128, 256)


def check_matmul_pack(x, w, tile, slots) -> None:
    """Raises NotImplementedError if the kernel cannot serve the arguments here."""
    del slots
    require_triton("triton")
    check_weights("triton", x, w)
    if tile not in TILES:
        raise NotImplementedError(f"backend 'triton' packs tiles of {TILES}, got {tile}")


def packed(x, w, tile: int, slots: int) -> Twell:
    """`relu(x w')` in the public form; x is `[M, D]`."""
    config = launch.PackConfig(tile=tile, slots=slots)
    words, _ = launch.pack_words(x, w, None, config=config)
    return to_twell(words, num_neurons=w.shape[0], tile=tile)


def check_twell_matmul(twell: Twell, w) -> None:
    """Raises NotImplementedError if the kernels cannot serve the arguments here."""
    require_triton("triton")
    check_weights("triton", twell, w)
    if launch.padded(twell.num_tiles) > launch.MAX_TILES:
        raise NotImplementedError(
            f"backend 'triton' serves up to {launch.MAX_TILES} tiles, got {twell.num_tiles}"
        )
    if _capacity(twell) >= 2**31:
        raise NotImplementedError(
            f"backend 'triton' numbers entries with 32 bits; {twell.shape} may have too many"
        )


def _capacity(twell: Twell) -> int:
    return math.prod(twell.value.shape)


def multiplied(twell: Twell, w) -> jax.Array:
    """`unpack(twell) w`, rows that overflowed being 0."""
    counts = twell.count.reshape(-1, twell.num_tiles)
    lengths = jnp.where(twell.overflowed.reshape(-1), 0, jnp.sum(counts, axis=1))
    lists = launch.make_lists(from_twell(twell), lengths, _capacity(twell))
    return launch.up_down(lists, None, None, w, None)[0]


matmul_pack = make_matmul_pack(packed)
twell_matmul = make_twell_matmul(multiplied)
