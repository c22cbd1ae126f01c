"""Up and down projections of the active neurons only, from packed gates.

One warpgroup a token: it gathers the entries of the token's words into a list, then reads,
per entry, one row of w_up and one of w_down, several entries at a time. Several warpgroups on
a multiprocessor, each at its own place, keep loads on their way. `h` is computed once and
feeds y and the L1 norm.

Bytes: `4 D` a (token, neuron) for both rows, nearly all from the L2, which bounds it; the
words once, and x and y once.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu.compact import compact_row, compact_row_interpreted
from pallas_kernels.mosaic_gpu.device import REGISTERS, SMEM_BYTES, num_sms
from pallas_kernels.mosaic_gpu.reduction import NUM_WARPS, warp_sums, warp_sums_interpreted
from pallas_kernels.shapes import varying

# Elements of D that the threads of a warpgroup must share evenly.
ROW_MULTIPLE = 256

# Elements of one dimension that one TMA copy can take: tiles, and words of a tile.
_COPY_TILES = MAX_ROW_WORDS = 256


@dataclasses.dataclass(frozen=True)
class ConsumerConfig:
    """How the kernel is cut up.

    Attributes:
      ctas_per_sm: thread blocks, of one warpgroup each, that share a multiprocessor. More
        than fit it are slow: some wait for the others to end.
      entries: list entries whose rows are loaded together.
    """

    ctas_per_sm: int
    entries: int = 2


def default_config(width: int, num_tiles: int, slots: int) -> ConsumerConfig:
    """As many thread blocks as the registers and the shared memory of a multiprocessor hold.

    Two entries at a time: of 1 to 4 tried on an H200 (D=2048), the fastest. A thread then has 4
    registers for every 128 elements of a row (y, x, and two rows each of w_up and w_down in
    bf16), and about 38 others; 5 blocks are resident, as counted for D=2048.
    """
    registers = 128 * (38 + 4 * pl.cdiv(width, 128))
    ctas = min(REGISTERS // registers, SMEM_BYTES // smem_bytes(num_tiles, slots), 16)
    return ConsumerConfig(ctas_per_sm=max(ctas, 1))


def smem_bytes(num_tiles: int, slots: int) -> int:
    """Shared memory of a thread block: two sets of words, the two lists, and 1 KiB."""
    return num_tiles * (2 * 4 * (slots + 1) + 8 * slots) + 1024


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


def _kernel(*refs, gated: bool, has_start: bool, config: ConsumerConfig, interpret: bool):
    words_ref, *refs = refs
    if gated:
        x_ref, up_ref, *refs = refs
    down_ref, *refs = refs
    if has_start:
        start_ref, *refs = refs
    y_ref, norm_ref, *scratch = refs
    words_smem, indices_smem, values_smem, length_smem, sums_smem, arrived = scratch
    num_rows, num_tiles, _ = words_ref.shape
    width = down_ref.shape[1]
    layout = _row_layout(width)
    step = lax.axis_size("cta")
    first = lax.axis_index("cta")
    compact = compact_row_interpreted if interpret else compact_row
    sum_of_warps = warp_sums_interpreted if interpret else warp_sums

    def load_row(ref, index):
        return ref[index] if interpret else plgpu.load(ref.at[index], layout=layout)

    def fetch(row, slot):
        for tiles in _pieces(num_tiles):
            plgpu.copy_gmem_to_smem(
                words_ref.at[row, tiles], words_smem.at[slot, tiles], arrived.at[slot]
            )

    @pl.when(first < num_rows)
    def _():
        fetch(first, 0)

    def of_token(number, slot):
        row = first + number * step
        plgpu.barrier_wait(arrived.at[slot])

        @pl.when(row + step < num_rows)
        def _():
            fetch(row + step, 1 - slot)

        compact(words_smem.at[slot], indices_smem, values_smem, length_smem)
        length = length_smem[0]
        x = load_row(x_ref, row).astype(jnp.float32) if gated else None

        def of_group(group, carry):
            y, norm = carry
            # Rows stay bf16 until they are used: registers decide how many can be on their way.
            places, hiddens, up_rows, down_rows = [], [], [], []
            for n in range(config.entries):
                place = group * config.entries + n
                # Past the end of the list the last entry stands in, and counts nothing.
                here = jnp.minimum(place, length - 1)
                index = indices_smem[here]
                places.append(place)
                hiddens.append(values_smem[here])
                if gated:
                    up_rows.append(load_row(up_ref, index))
                down_rows.append(load_row(down_ref, index))
            if gated:
                # Two sets of sums in turn: a set is written again after the barrier of the
                # next one, when all threads have read it.
                sums = sums_smem.at[lax.rem(group, 2)]
                sum_of_warps([x * row.astype(jnp.float32) for row in up_rows], layout, sums)
            for n in range(config.entries):
                hidden = hiddens[n]
                if gated:
                    up = sum(sums[n, warp] for warp in range(NUM_WARPS))
                    hidden = hidden * up.astype(jnp.bfloat16).astype(jnp.float32)
                hidden = jnp.where(places[n] < length, hidden, 0.0)
                norm = norm + jnp.abs(hidden)
                rounded = hidden.astype(jnp.bfloat16).astype(jnp.float32)
                y = y + rounded * down_rows[n].astype(jnp.float32)
            return y, norm

        if has_start:
            start = load_row(start_ref, row).astype(jnp.float32)
        else:
            start = jnp.zeros((width,), jnp.float32)
            if not interpret:
                start = plgpu.layout_cast(start, layout)
        num_groups = pl.cdiv(length, config.entries)
        y, norm = lax.fori_loop(0, num_groups, of_group, (start, jnp.float32(0)))
        y_ref[row] = y.astype(y_ref.dtype)
        norm_ref[row] = norm
        return 1 - slot

    num_tokens = lax.div(num_rows - first + step - 1, step)
    lax.fori_loop(0, num_tokens, of_token, jnp.int32(0))


def up_down(
    words: jax.Array,
    x: jax.Array | None,
    w_up: jax.Array | None,
    w_down: jax.Array,
    start: jax.Array | None,
    *,
    config: ConsumerConfig,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`y = start + h w_down` with `h = g * (x w_up')`, or `h = g` without x and w_up.

    Args:
      words: int32 `[M, num_tiles, slots + 1]`, see `words`: the gates g.
      x: bf16 `[M, D]`, D a multiple of `ROW_MULTIPLE`, or None.
      w_up: bf16 `[H, D]`, or None.
      w_down: bf16 `[H, D]`.
      start: bf16 `[M, D]`, or None for 0.
      config: of the kernel.
      interpret: runs it in the interpreter.

    Returns:
      y, bf16 `[M, D]`, and the L1 norm of h, f32 `[M]`; `start` and 0 in a row that lost entries.
    """
    rows, num_tiles, width = words.shape
    list_size = num_tiles * (width - 1)
    operands = (words, *(a for a in (x, w_up, w_down, start) if a is not None))
    results = plgpu.kernel(
        functools.partial(
            _kernel,
            gated=x is not None,
            has_start=start is not None,
            config=config,
            interpret=interpret is not None,
        ),
        out_type=(
            jax.ShapeDtypeStruct((rows, w_down.shape[1]), w_down.dtype),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ),
        grid=(num_sms() * config.ctas_per_sm,),
        grid_names=("cta",),
        num_threads=1,
        thread_name="wg",
        scratch_types=(
            plgpu.SMEM((2, num_tiles, width), jnp.int32),
            plgpu.SMEM((list_size,), jnp.int32),
            plgpu.SMEM((list_size,), jnp.float32),
            plgpu.SMEM((1,), jnp.int32),
            plgpu.SMEM((2, config.entries, NUM_WARPS), jnp.float32),
            plgpu.Barrier(num_arrivals=len(_pieces(num_tiles)), num_barriers=2),
        ),
        interpret=interpret,
    )(*operands)
    return varying(results, operands)
