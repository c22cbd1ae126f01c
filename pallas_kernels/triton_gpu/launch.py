"""Launches of the Triton kernels: shapes, grids and configurations.

`kernels` is imported where it is needed, because it imports triton.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.triton_gpu.call import call
from pallas_kernels.words import num_tiles

# Tiles of a row that the registers of a thread block hold.
MAX_TILES = 16384


@dataclasses.dataclass(frozen=True)
class PackConfig:
    """How the packing matmul is cut up.

    Attributes:
      tile: neurons of a tile, a power of two.
      slots: entries of a (row, tile).
      block_m: tokens of a block.
      block_k: elements of D of a step.
      group_m: neighbouring blocks of rows that run together.
      num_warps, num_stages: of Triton. The fastest of four configurations tried on an H200
        whose buffers fit the shared memory of smaller GPUs, too.
    """

    tile: int = 128
    slots: int = 15
    block_m: int = 128
    block_k: int = 64
    group_m: int = 8
    num_warps: int = 4
    num_stages: int = 3


def padded(size: int) -> int:
    """The next power of two, as Triton's blocks need."""
    return 1 << (size - 1).bit_length()


def pack_words(x, w, token_mask, *, config: PackConfig) -> tuple[jax.Array, jax.Array]:
    """Packs `relu(x w')`, rounded to bf16.

    Args:
      x: bf16 `[M, D]`, D a multiple of `block_k`.
      w: bf16 `[H, D]`.
      token_mask: bool `[M]`, True for the tokens that `fired` counts; None for all.
      config: of the kernel.

    Returns:
      words, int32 `[M, num_tiles, slots + 1]`, and `fired`, int32 `[H]`.
    """
    from pallas_kernels.triton_gpu import kernels

    rows, neurons = x.shape[0], w.shape[0]
    tiles, blocks = num_tiles(neurons, config.tile), -(-rows // config.block_m)
    weight = jnp.ones(rows, jnp.int32) if token_mask is None else token_mask.astype(jnp.int32)
    words, fired = call(
        kernels.pack_matmul,
        x,
        w,
        weight,
        out_type=(
            jax.ShapeDtypeStruct((rows, tiles, config.slots + 1), jnp.int32),
            jax.ShapeDtypeStruct((blocks, tiles * config.tile), jnp.int32),
        ),
        grid=(blocks * tiles,),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        num_rows=rows,
        num_neurons=neurons,
        width=x.shape[1],
        num_tiles=tiles,
        slots=config.slots,
        tile=config.tile,
        block_m=config.block_m,
        block_k=config.block_k,
        group_m=config.group_m,
    )
    return words, jnp.sum(fired, axis=0)[:neurons]


class Lists(NamedTuple):
    """The active neurons of every row, one row behind the other.

    Attributes:
      entries: int32 `[capacity]`, entries of `words`; undefined past the last one.
      offsets: int32 `[M + 1]`: the list of row t is `entries[offsets[t]:offsets[t + 1]]`.
    """

    entries: jax.Array
    offsets: jax.Array


def make_lists(words, lengths, capacity: int) -> Lists:
    """Gathers the entries of each row.

    Args:
      words: int32 `[M, num_tiles, slots + 1]`.
      lengths: int32 `[M]`: for every row its number of entries, or 0 to leave it out. A row
        that lost entries must be left out, and the sum must not be above `capacity`.
      capacity: entries there is room for.
    """
    from pallas_kernels.triton_gpu import kernels

    rows, tiles, row_words = words.shape
    offsets = jnp.pad(jnp.cumsum(lengths, dtype=jnp.int32), (1, 0))
    tiles_padded = padded(tiles)
    # 512 counts are 4 for every thread.
    block_m = max(512 // tiles_padded, 1)
    (entries,) = call(
        kernels.make_lists,
        words,
        offsets,
        out_type=(jax.ShapeDtypeStruct((capacity,), jnp.int32),),
        grid=(-(-rows // block_m),),
        num_rows=rows,
        num_tiles=tiles,
        slots=row_words - 1,
        block_m=block_m,
        tiles_padded=tiles_padded,
    )
    return Lists(entries, offsets)


def up_down(lists: Lists, x, w_up, w_down, start) -> tuple[jax.Array, jax.Array]:
    """`y = start + h w_down` with `h = g * (x w_up')`, or `h = g` without x and w_up.

    Args:
      lists: the gates g.
      x: bf16 `[M, D]`, or None.
      w_up: bf16 `[H, D]`, or None.
      w_down: bf16 `[H, D]`.
      start: bf16 `[M, D]`, or None for 0.

    Returns:
      y, bf16 `[M, D]`, and the L1 norm of h, f32 `[M]`; `start` and 0 where a list is empty.
    """
    from pallas_kernels.triton_gpu import kernels

    rows, width = len(lists.offsets) - 1, w_down.shape[1]
    gated = x is not None
    return call(
        kernels.up_down,
        *lists,
        # What is not there is not read; every argument must be an array.
        x if gated else w_down,
        w_up if gated else w_down,
        w_down,
        w_down if start is None else start,
        out_type=(
            jax.ShapeDtypeStruct((rows, width), jnp.bfloat16),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ),
        grid=(rows,),
        # 512 columns a warp; two entries at a time: the fastest on an H200 (D=2048).
        num_warps=min(max(padded(width) // 512, 1), 16),
        width=width,
        width_padded=padded(width),
        group=2,
        gated=gated,
        has_start=start is not None,
    )
