"""The Triton kernels themselves. Importing this module imports triton.

They read and write the words of `pallas_kernels.words`. Offsets into arrays are 64-bit, as
arrays may have more than 2^31 elements.
"""

import triton
import triton.language as tl


@triton.jit
def pack_matmul(
    x,
    w,
    token_weight,
    words,
    fired,
    num_rows: tl.constexpr,
    num_neurons: tl.constexpr,
    width: tl.constexpr,
    num_tiles: tl.constexpr,
    slots: tl.constexpr,
    tile: tl.constexpr,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
    group_m: tl.constexpr,
):
    """Packs one block of `block_m` rows and one tile of neurons of `relu(x w')`.

    Blocks run in groups of `group_m` blocks of rows, so that they share tiles of w in the L2.
    """
    program = tl.program_id(0)
    grid_m: tl.constexpr = (num_rows + block_m - 1) // block_m
    group = program // (group_m * num_tiles)
    first_block = group * group_m
    blocks_here = min(grid_m - first_block, group_m)
    within = program - group * (group_m * num_tiles)
    block = first_block + within % blocks_here
    number = within // blocks_here

    rows = block.to(tl.int64) * block_m + tl.arange(0, block_m)
    columns = number * tile + tl.arange(0, tile)
    depth = tl.arange(0, block_k)
    has_row, has_column = rows < num_rows, columns < num_neurons
    x_at = x + rows[:, None] * width + depth[None, :]
    w_at = w + columns[:, None].to(tl.int64) * width + depth[None, :]
    gate = tl.zeros((block_m, tile), tl.float32)
    for _ in range(0, width, block_k):
        x_block = tl.load(x_at, mask=has_row[:, None], other=0)
        w_block = tl.load(w_at, mask=has_column[:, None], other=0)
        gate = tl.dot(x_block, w_block.T, gate)
        x_at += block_k
        w_at += block_k

    # NaN is not below 0, so it stays.
    gate = tl.where(gate < 0, 0.0, gate).to(tl.bfloat16)
    # Columns that do not exist are products with zeros, which of a NaN are NaN.
    active = (gate != 0) & has_column[None, :]
    ones = active.to(tl.int32)
    place = tl.cumsum(ones, axis=1) - ones
    bits = gate.to(tl.int16, bitcast=True).to(tl.int32) << 16
    words_of_row = words + (rows * num_tiles + number) * (slots + 1)
    tl.store(
        words_of_row[:, None] + 1 + place,
        bits | columns[None, :],
        mask=active & (place < slots) & has_row[:, None],
    )
    tl.store(words_of_row, tl.sum(ones, axis=1), mask=has_row)
    weight = tl.load(token_weight + rows, mask=has_row, other=0)
    tl.store(
        fired + block.to(tl.int64) * (num_tiles * tile) + columns,
        tl.sum(ones * weight[:, None], axis=0),
    )


@triton.jit
def make_lists(
    words,
    offsets,
    entries,
    num_rows: tl.constexpr,
    num_tiles: tl.constexpr,
    slots: tl.constexpr,
    block_m: tl.constexpr,
    tiles_padded: tl.constexpr,
):
    """Moves the entries of `block_m` rows, tile by tile, to their lists.

    A row whose list has length 0 is left out, whatever it holds.
    """
    row = tl.program_id(0).to(tl.int64) * block_m + tl.arange(0, block_m)
    tile = tl.arange(0, tiles_padded)
    has_row = row < num_rows
    begin = tl.load(offsets + row, mask=has_row, other=0)
    end = tl.load(offsets + row + 1, mask=has_row, other=0)
    wanted = (begin < end)[:, None] & (tile < num_tiles)[None, :]
    first = words + (row[:, None] * num_tiles + tile[None, :]) * (slots + 1)
    counts = tl.load(first, mask=wanted, other=0)
    place = begin[:, None] + tl.cumsum(counts, axis=1) - counts
    for slot in range(0, tl.max(tl.max(counts, axis=1), axis=0)):
        there = slot < counts
        entry = tl.load(first + 1 + slot, mask=there, other=0)
        tl.store(entries + place + slot, entry, mask=there)


@triton.jit
def up_down(
    entries,
    offsets,
    x,
    w_up,
    w_down,
    start,
    y,
    norms,
    width: tl.constexpr,
    width_padded: tl.constexpr,
    group: tl.constexpr,
    gated: tl.constexpr,
    has_start: tl.constexpr,
):
    """One row of `y = start + h w_down`, `h = g * (x w_up')` or `g`, and the L1 norm of h."""
    row = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    column = tl.arange(0, width_padded)
    has_column = column < width
    if has_start:
        result = tl.load(start + row * width + column, mask=has_column, other=0).to(tl.float32)
    else:
        result = tl.zeros((width_padded,), tl.float32)
    norm = 0.0
    if gated:
        token = tl.load(x + row * width + column, mask=has_column, other=0).to(tl.float32)
    for first in range(begin, end, group):
        place = first + tl.arange(0, group)
        there = place < end
        word = tl.load(entries + place, mask=there, other=0)
        neuron = (word & 0xFFFF).to(tl.int64)
        hidden = (word & -65536).to(tl.float32, bitcast=True)
        at = neuron[:, None] * width + column[None, :]
        mask = there[:, None] & has_column[None, :]
        if gated:
            up_rows = tl.load(w_up + at, mask=mask, other=0).to(tl.float32)
            down_rows = tl.load(w_down + at, mask=mask, other=0)
            up = tl.sum(up_rows * token[None, :], axis=1)
            hidden = tl.where(there, hidden * up.to(tl.bfloat16).to(tl.float32), 0)
        else:
            down_rows = tl.load(w_down + at, mask=mask, other=0)
        norm += tl.sum(tl.abs(hidden), axis=0)
        rounded = hidden.to(tl.bfloat16).to(tl.float32)
        result += tl.sum(rounded[:, None] * down_rows.to(tl.float32), axis=0)
    tl.store(y + row * width + column, result.to(tl.bfloat16), mask=has_column)
    tl.store(norms + row, norm)
