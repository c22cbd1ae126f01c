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
    lists,
    lengths,
    num_active,
    num_tiles: tl.constexpr,
    slots: tl.constexpr,
    tiles_padded: tl.constexpr,
    words_padded: tl.constexpr,
):
    """Moves the entries of one row, tile by tile, to the front of its list.

    The length of a row that lost entries is -1, and its list is not written.
    """
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, tiles_padded)
    word = tl.arange(0, words_padded)
    first = words + (row * num_tiles + tiles) * (slots + 1)
    counts = tl.load(first, mask=tiles < num_tiles, other=0)
    total = tl.sum(counts, axis=0)
    fits = tl.max(counts, axis=0) <= slots
    start = tl.cumsum(counts, axis=0) - counts
    kept = tl.where(fits, counts, 0)
    there = word[None, :] < kept[:, None]
    entries = tl.load(first[:, None] + 1 + word[None, :], mask=there, other=0)
    place = row * (num_tiles * slots) + start[:, None] + word[None, :]
    tl.store(lists + place, entries, mask=there)
    tl.store(lengths + row, tl.where(fits, total, -1))
    tl.store(num_active + row, total)


@triton.jit
def up_down(
    lists,
    lengths,
    x,
    w_up,
    w_down,
    y,
    norms,
    capacity: tl.constexpr,
    width: tl.constexpr,
    width_padded: tl.constexpr,
    entries: tl.constexpr,
    gated: tl.constexpr,
):
    """One row of `y = h w_down`, `h = g * (x w_up')` or `g`, and the L1 norm of h.

    A row of length 0 or -1 gives 0.
    """
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row)
    column = tl.arange(0, width_padded)
    has_column = column < width
    result = tl.zeros((width_padded,), tl.float32)
    norm = 0.0
    if gated:
        token = tl.load(x + row * width + column, mask=has_column, other=0).to(tl.float32)
    for first in range(0, length, entries):
        place = first + tl.arange(0, entries)
        there = place < length
        word = tl.load(lists + row * capacity + place, mask=there, other=0)
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
