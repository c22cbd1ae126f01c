"""`matmul_pack` and `twell_matmul` on Hopper, with the gradients of the reference."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic_gpu import consumer, gate
from pallas_kernels.mosaic_gpu.device import SMEM_BYTES, require_hopper
from pallas_kernels.mosaic_gpu.shapes import check_weights, pad_columns
from pallas_kernels.mosaic_gpu.words import from_twell, to_twell
from pallas_kernels.reference.packing import matmul_pack_backward, twell_matmul_backward
from pallas_kernels.twell import Twell


def check_matmul_pack(x, w, tile, slots) -> None:
    """Raises NotImplementedError if these kernels cannot serve the arguments here."""
    require_hopper()
    check_weights(x, w)
    if tile != gate.TILE:
        raise NotImplementedError(f"backend 'mosaic_gpu' packs tiles of {gate.TILE}, got {tile}")
    if slots > gate.MAX_SLOTS or (slots + 1) % 4:
        raise NotImplementedError(
            f"backend 'mosaic_gpu' packs 3, 7, 11, ... {gate.MAX_SLOTS} slots, got {slots}"
        )


def packed(x, w, slots: int, *, interpret=None) -> Twell:
    """`relu(x w')` in the public form."""
    words, _ = gate.gate_words(
        x.reshape(-1, x.shape[-1]), w, None, config=gate.default_config(slots), interpret=interpret
    )
    twell = to_twell(words, num_neurons=w.shape[0], tile=gate.TILE)
    return jax.tree.map(lambda leaf: leaf.reshape(*x.shape[:-1], *leaf.shape[1:]), twell)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def matmul_pack(x, w, tile, slots) -> Twell:
    """See `pallas_kernels.ops.matmul_pack`."""
    del tile
    # The kernel has no batch axis: a map over it is a loop.
    return jax.custom_batching.sequential_vmap(functools.partial(packed, slots=slots))(x, w)


def _matmul_pack_forward(x, w, tile, slots):
    twell = matmul_pack(x, w, tile, slots)
    return twell, (x, w, twell)


matmul_pack.defvjp(_matmul_pack_forward, matmul_pack_backward)


def check_twell_matmul(twell: Twell, w) -> None:
    """Raises NotImplementedError if the kernel cannot serve the arguments here."""
    require_hopper()
    check_weights(twell, w)
    if consumer.smem_bytes(twell.num_tiles, twell.slots + 3) > SMEM_BYTES:
        raise NotImplementedError(
            f"backend 'mosaic_gpu' cannot hold a row of {twell.num_tiles} tiles of {twell.slots} "
            "slots in shared memory"
        )


def multiplied(twell: Twell, w, *, interpret=None) -> jax.Array:
    """`unpack(twell) w`."""
    words = from_twell(twell)
    down = pad_columns(w, consumer.ROW_MULTIPLE)
    config = consumer.default_config(down.shape[1], twell.num_tiles, words.shape[-1] - 1)
    y, _ = consumer.up_down(words, None, None, down, config=config, interpret=interpret)
    y = y[:, : w.shape[1]].reshape(*twell.shape[:-1], w.shape[1])
    return jnp.where(twell.overflowed[..., None], jnp.nan, y)


@jax.custom_vjp
def twell_matmul(twell: Twell, w) -> jax.Array:
    """See `pallas_kernels.ops.twell_matmul`."""
    return jax.custom_batching.sequential_vmap(multiplied)(twell, w)


def _twell_matmul_forward(twell, w):
    return twell_matmul(twell, w), (twell, w)


twell_matmul.defvjp(_twell_matmul_forward, twell_matmul_backward)
