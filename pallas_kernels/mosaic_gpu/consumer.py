"""Up and down projections of the active neurons only, from packed gates.

One warpgroup a token: it gathers the entries of the token's words into a list, then reads,
per entry, one row of w_up and one of w_down. Loads never stop: the rows of a group of entries
are sent for before the group before is computed, those of the next token's first group before
the token's last one; its list is made while rows are on their way. `h` is computed once and
feeds y and the L1 norm.

Bytes: `4 D` a (token, neuron) for both rows, nearly all from the L2, which bounds it; the
words once, and x and y once.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu.compact import compact_row, compact_row_interpreted
from pallas_kernels.mosaic_gpu.device import num_sms
from pallas_kernels.mosaic_gpu.reduction import NUM_WARPS, warp_sums, warp_sums_interpreted

# Elements of D that the threads of a warpgroup must share evenly.
ROW_MULTIPLE = 256

# Elements of one dimension that one TMA copy can take.
_COPY_TILES = 256


@dataclasses.dataclass(frozen=True)
class ConsumerConfig:
    """How the kernel is cut up.

    Attributes:
      ctas_per_sm: thread blocks, of one warpgroup each, that share a multiprocessor.
      entries: list entries whose rows are loaded together.
    """

    ctas_per_sm: int = 4
    entries: int = 2


def _row_layout(width: int):
    """Spreads a row over 128 threads in pieces of up to 16 bytes of bf16."""
    vec_size = next(size for size in (8, 4, 2) if width % (128 * size) == 0)
    return plgpu.Layout.WG_STRIDED((width,), vec_size=vec_size)


def _pieces(num_tiles: int) -> list:
    """The tiles of a row in pieces that one copy can take."""
    return [
        pl.ds(first, min(_COPY_TILES, num_tiles - first))
        for first in range(0, num_tiles, _COPY_TILES)
    ]


class _Group(NamedTuple):
    """Some entries of a token: where they stand in its list, gates, and rows of the weights."""

    places: tuple
    gates: tuple
    up_rows: tuple
    down_rows: tuple


def _kernel(*refs, gated: bool, config: ConsumerConfig, interpret: bool):
    if gated:
        words_ref, x_ref, up_ref, down_ref, y_ref, norm_ref, totals_ref, *scratch = refs
    else:
        words_ref, down_ref, y_ref, norm_ref, totals_ref, *scratch = refs
    words_smem, indices_smem, values_smem, row_totals_smem, sums_smem, arrived = scratch
    num_rows, num_tiles, _ = words_ref.shape
    width = down_ref.shape[1]
    layout = _row_layout(width)
    step = lax.axis_size("cta")
    first = lax.axis_index("cta")
    compact = compact_row_interpreted if interpret else compact_row
    sum_of_warps = warp_sums_interpreted if interpret else warp_sums

    def load_row(ref, index):
        return ref[index] if interpret else plgpu.load(ref.at[index], layout=layout)

    def load_x(row):
        return (load_row(x_ref, row),) if gated else ()

    def row_of(number):
        return first + number * step

    def fetch(number):
        """Sends for the words of token `number` of this block, if there is one."""

        @pl.when(row_of(number) < num_rows)
        def _():
            slot = lax.rem(number, 2)
            for tiles in _pieces(num_tiles):
                plgpu.copy_gmem_to_smem(
                    words_ref.at[row_of(number), tiles],
                    words_smem.at[slot, tiles],
                    arrived.at[slot],
                )

    def make_lists(number):
        """Compacts token `number`, whose words were sent for, and sends for the one after next."""

        @pl.when(row_of(number) < num_rows)
        def _():
            slot = lax.rem(number, 2)
            plgpu.barrier_wait(arrived.at[slot])
            compact(
                words_smem.at[slot],
                indices_smem.at[slot],
                values_smem.at[slot],
                row_totals_smem.at[slot],
            )
            fetch(number + 2)

    def length_of(number):
        return jnp.where(row_of(number) < num_rows, row_totals_smem[lax.rem(number, 2), 0], 0)

    def load_group(number, length, group) -> _Group:
        slot = lax.rem(number, 2)
        places, gates, up_rows, down_rows = [], [], [], []
        for n in range(config.entries):
            place = group * config.entries + n
            # Past the end of the list the last entry stands in, and counts nothing. An empty
            # list has none; any row does, as y is not used.
            here = jnp.maximum(jnp.minimum(place, length - 1), 0)
            index = jnp.where(length > 0, indices_smem[slot, here], 0)
            places.append(place)
            gates.append(values_smem[slot, here])
            if gated:
                up_rows.append(load_row(up_ref, index))
            down_rows.append(load_row(down_ref, index))
        return _Group(tuple(places), tuple(gates), tuple(up_rows), tuple(down_rows))

    def of_token(number, carry):
        x, group_0 = carry
        length, total, overflowed = (row_totals_smem[lax.rem(number, 2), n] for n in range(3))
        # While the rows of the first group are on their way:
        make_lists(number + 1)
        next_x = load_x(jnp.minimum(row_of(number + 1), num_rows - 1))
        next_length = length_of(number + 1)
        num_groups = jnp.maximum(pl.cdiv(length, config.entries), 1)

        def of_group(number_of_group, carry):
            y, norm, group = carry
            is_last = number_of_group == num_groups - 1
            upcoming = load_group(
                jnp.where(is_last, number + 1, number),
                jnp.where(is_last, next_length, length),
                jnp.where(is_last, 0, number_of_group + 1),
            )
            if gated:
                # Two sets of sums in turn: a set is written again after the barrier of the
                # next one, when all threads have read it.
                sums = sums_smem.at[lax.rem(number_of_group, 2)]
                products = [
                    x[0].astype(jnp.float32) * up_row.astype(jnp.float32)
                    for up_row in group.up_rows
                ]
                sum_of_warps(products, layout, sums)
            for n in range(config.entries):
                hidden = group.gates[n]
                if gated:
                    up = sum(sums[n, warp] for warp in range(NUM_WARPS))
                    hidden = hidden * up.astype(jnp.bfloat16).astype(jnp.float32)
                hidden = jnp.where(group.places[n] < length, hidden, 0.0)
                norm = norm + jnp.abs(hidden)
                y = y + hidden.astype(jnp.bfloat16).astype(jnp.float32) * group.down_rows[n].astype(
                    jnp.float32
                )
            return y, norm, upcoming

        zeros = jnp.zeros((width,), jnp.float32)
        if not interpret:
            zeros = plgpu.layout_cast(zeros, layout)
        y, norm, next_group = lax.fori_loop(
            0, num_groups, of_group, (zeros, jnp.float32(0), group_0)
        )
        row = row_of(number)

        @pl.when(length > 0)
        def _():
            y_ref[row] = y.astype(y_ref.dtype)

        @pl.when(length == 0)
        def _():
            y_ref[row] = zeros.astype(y_ref.dtype)

        norm_ref[row] = norm
        totals_ref[row] = jnp.where(overflowed == 0, total, -total)
        return next_x, next_group

    @pl.when(first < num_rows)
    def _():
        fetch(0)
        fetch(1)
        make_lists(0)
        num_tokens = lax.div(num_rows - first + step - 1, step)
        carry = load_x(first), load_group(0, length_of(0), 0)
        lax.fori_loop(0, num_tokens, of_token, carry)


def up_down(
    words: jax.Array,
    x: jax.Array | None,
    w_up: jax.Array | None,
    w_down: jax.Array,
    *,
    config: ConsumerConfig,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`y = h w_down` with `h = g * (x w_up')`, or `h = g` without x and w_up.

    Args:
      words: int32 `[M, num_tiles, slots + 1]`, see `words`: the gates g.
      x: bf16 `[M, D]`, D a multiple of `ROW_MULTIPLE`, or None.
      w_up: bf16 `[H, D]`, or None.
      w_down: bf16 `[H, D]`.
      config: of the kernel.
      interpret: runs it in the interpreter.

    Returns:
      y, bf16 `[M, D]`; the L1 norm of h, f32 `[M]`; and the number of active neurons,
      int32 `[M]`. A row that lost entries has a negative number, y of 0 and a norm of 0.
    """
    rows, num_tiles, width = words.shape
    list_size = num_tiles * (width - 1)
    operands = (words, w_down) if x is None else (words, x, w_up, w_down)
    return plgpu.kernel(
        functools.partial(
            _kernel,
            gated=x is not None,
            config=config,
            interpret=interpret is not None,
        ),
        out_type=(
            jax.ShapeDtypeStruct((rows, w_down.shape[1]), w_down.dtype),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
            jax.ShapeDtypeStruct((rows,), jnp.int32),
        ),
        grid=(num_sms() * config.ctas_per_sm,),
        grid_names=("cta",),
        num_threads=1,
        thread_name="wg",
        scratch_types=(
            plgpu.SMEM((2, num_tiles, width), jnp.int32),
            plgpu.SMEM((2, list_size), jnp.int32),
            plgpu.SMEM((2, list_size), jnp.float32),
            plgpu.SMEM((2, 4), jnp.int32),
            plgpu.SMEM((2, config.entries, NUM_WARPS), jnp.float32),
            plgpu.Barrier(num_arrivals=len(_pieces(num_tiles)), num_barriers=2),
        ),
        interpret=interpret,
    )(*operands)
