"""The Triton kernels of the backward pass. Importing this module imports triton.

Lists by row (token -> neurons) come from the forward pass. Lists by neuron (neuron -> tokens),
for the weight gradients, are made without sorting: a matrix of marks, one bit for every
(token, neuron) pair, 32 tokens a word, tells how many tokens before a given one are in a list,
by counting bits. Setting a bit is the one atomic operation; its order leaves no trace.
"""

import triton
import triton.language as tl

# Rows of marks whose bits one count is kept for: 128 tokens.
WORDS_OF_BLOCK = tl.constexpr(4)


@triton.jit
def _count_bits(word):
    """Of every 32-bit word, as neighbours of 1, 2, 4 bits and so on are added."""
    word = word.to(tl.uint32, bitcast=True)
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def mark_pairs(
    entries,
    offsets,
    marks,
    num_neurons: tl.constexpr,
    group: tl.constexpr,
):
    """Sets the bits of one row; `marks` must be 0."""
    row = tl.program_id(0)
    begin, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    bit = tl.full((group,), 1, tl.int32) << (row % 32)
    of_row = marks + (row // 32).to(tl.int64) * num_neurons
    for first in range(begin, end, group):
        place = first + tl.arange(0, group)
        there = place < end
        neuron = tl.load(entries + place, mask=there, other=0) & 0xFFFF
        tl.atomic_or(of_row + neuron, bit, mask=there, sem="relaxed")


@triton.jit
def count_marks(
    marks,
    before,
    totals,
    num_blocks: tl.constexpr,
    num_neurons: tl.constexpr,
    block_n: tl.constexpr,
    blocks_at_once: tl.constexpr,
):
    """For `block_n` neurons: marks before every block of `WORDS_OF_BLOCK` rows, and all of them."""
    neuron = tl.program_id(0) * block_n + tl.arange(0, block_n)
    has_neuron = neuron < num_neurons
    carry = tl.zeros((block_n,), tl.int32)
    for first in range(0, num_blocks, blocks_at_once):
        block = first + tl.arange(0, blocks_at_once)
        here = (block < num_blocks)[:, None] & has_neuron[None, :]
        at = block[:, None].to(tl.int64) * (WORDS_OF_BLOCK * num_neurons) + neuron[None, :]
        counts = tl.zeros((blocks_at_once, block_n), tl.int32)
        for word in tl.static_range(WORDS_OF_BLOCK):
            counts += _count_bits(tl.load(marks + at + word * num_neurons, mask=here, other=0))
        upto = tl.cumsum(counts, axis=0)
        at = block[:, None].to(tl.int64) * num_neurons + neuron[None, :]
        tl.store(before + at, upto - counts + carry[None, :], mask=here)
        carry += tl.sum(counts, axis=0)
    tl.store(totals + neuron, carry, mask=has_neuron)


@triton.jit
def place_pairs(
    entries,
    offsets,
    marks,
    before,
    neuron_offsets,
    places,
    tokens,
    num_neurons: tl.constexpr,
    group: tl.constexpr,
):
    """Where the entries of one row stand in the lists by neuron; puts its number there."""
    row = tl.program_id(0)
    begin, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    block, word_of_row = row // (32 * WORDS_OF_BLOCK), (row // 32) % WORDS_OF_BLOCK
    earlier = (1 << (row % 32)) - 1
    words = marks + block.to(tl.int64) * (WORDS_OF_BLOCK * num_neurons)
    for first in range(begin, end, group):
        here = first + tl.arange(0, group)
        there = here < end
        neuron = tl.load(entries + here, mask=there, other=0) & 0xFFFF
        place = tl.load(neuron_offsets + neuron, mask=there, other=0)
        place += tl.load(before + block.to(tl.int64) * num_neurons + neuron, mask=there, other=0)
        for number in tl.static_range(WORDS_OF_BLOCK):
            word = tl.load(words + number * num_neurons + neuron, mask=there, other=0)
            counted = tl.where(
                number < word_of_row, -1, tl.where(number == word_of_row, earlier, 0)
            )
            place += _count_bits(word & counted)
        tl.store(places + here, place, mask=there)
        tl.store(tokens + place, tl.full((group,), 0, tl.int32) + row, mask=there)


@triton.jit
def token_gradients(
    entries,
    offsets,
    places,
    l1_scale,
    x,
    y_bar,
    w_gate,
    w_up,
    w_down,
    start,
    dx,
    up_bars,
    gate_bars,
    hiddens,
    width: tl.constexpr,
    width_padded: tl.constexpr,
    group: tl.constexpr,
    gated: tl.constexpr,
    has_start: tl.constexpr,
):
    """One row of dx, and `ubar`, `gbar` and h of its entries, at their places by neuron.

    `l1_scale` is the derivative by the L1 norm of h of this row, whose dx is added to `start`.
    """
    row = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    column = tl.arange(0, width_padded)
    has_column = column < width
    if has_start:
        result = tl.load(start + row * width + column, mask=has_column, other=0).to(tl.float32)
    else:
        result = tl.zeros((width_padded,), tl.float32)
    scale = tl.load(l1_scale + row)
    y_row = tl.load(y_bar + row * width + column, mask=has_column, other=0).to(tl.float32)
    if gated:
        x_row = tl.load(x + row * width + column, mask=has_column, other=0).to(tl.float32)
    for first in range(begin, end, group):
        here = first + tl.arange(0, group)
        there = here < end
        word = tl.load(entries + here, mask=there, other=0)
        place = tl.load(places + here, mask=there, other=0)
        neuron = (word & 0xFFFF).to(tl.int64)
        gate = (word & -65536).to(tl.float32, bitcast=True)
        at = neuron[:, None] * width + column[None, :]
        mask = there[:, None] & has_column[None, :]
        down_rows = tl.load(w_down + at, mask=mask, other=0)
        up_rows = tl.load(w_up + at, mask=mask, other=0).to(tl.float32)
        if gated:
            gate_rows = tl.load(w_gate + at, mask=mask, other=0)
            up = tl.sum(up_rows * x_row[None, :], axis=1).to(tl.bfloat16).to(tl.float32)
            hidden = gate * up
        else:
            hidden = gate
        hidden_bar = tl.sum(down_rows.to(tl.float32) * y_row[None, :], axis=1)
        # The sign of a NaN is NaN.
        sign = tl.where(hidden > 0, 1.0, tl.where(hidden < 0, -1.0, hidden))
        hidden_bar += tl.where(scale != 0, scale * sign, 0)
        if gated:
            up_bar = (hidden_bar * gate).to(tl.bfloat16)
            gate_bar = (hidden_bar * up).to(tl.bfloat16)
            factor = tl.where(there, gate_bar.to(tl.float32), 0)
            result += tl.sum(factor[:, None] * gate_rows.to(tl.float32), axis=0)
            tl.store(gate_bars + place, gate_bar, mask=there)
        else:
            up_bar = hidden_bar.to(tl.bfloat16)
        factor = tl.where(there, up_bar.to(tl.float32), 0)
        result += tl.sum(factor[:, None] * up_rows, axis=0)
        tl.store(up_bars + place, up_bar, mask=there)
        tl.store(hiddens + place, hidden.to(tl.bfloat16), mask=there)
    tl.store(dx + row * width + column, result.to(tl.bfloat16), mask=has_column)


@triton.jit
def _sum_list(
    begin,
    end,
    column,
    tokens,
    up_bars,
    gate_bars,
    hiddens,
    x,
    y_bar,
    width: tl.constexpr,
    block_d: tl.constexpr,
    group: tl.constexpr,
    gated: tl.constexpr,
):
    """Sums of `gbar x`, `ubar x` and `h ybar` over a part of a list, for some columns."""
    has_column = column < width
    gate_sum = tl.zeros((block_d,), tl.float32)
    up_sum = tl.zeros((block_d,), tl.float32)
    down_sum = tl.zeros((block_d,), tl.float32)
    for first in range(begin, end, group):
        place = first + tl.arange(0, group)
        there = place < end
        token = tl.load(tokens + place, mask=there, other=0).to(tl.int64)
        at = token[:, None] * width + column[None, :]
        mask = there[:, None] & has_column[None, :]
        x_rows = tl.load(x + at, mask=mask, other=0).to(tl.float32)
        y_rows = tl.load(y_bar + at, mask=mask, other=0).to(tl.float32)
        up_bar = tl.load(up_bars + place, mask=there, other=0).to(tl.float32)
        hidden = tl.load(hiddens + place, mask=there, other=0).to(tl.float32)
        up_sum += tl.sum(up_bar[:, None] * x_rows, axis=0)
        down_sum += tl.sum(hidden[:, None] * y_rows, axis=0)
        if gated:
            gate_bar = tl.load(gate_bars + place, mask=there, other=0).to(tl.float32)
            gate_sum += tl.sum(gate_bar[:, None] * x_rows, axis=0)
    return gate_sum, up_sum, down_sum


@triton.jit
def sum_segments(
    segment_begin,
    segment_end,
    tokens,
    up_bars,
    gate_bars,
    hiddens,
    x,
    y_bar,
    sums,
    num_segments: tl.constexpr,
    width: tl.constexpr,
    block_d: tl.constexpr,
    group: tl.constexpr,
    gated: tl.constexpr,
):
    """`block_d` columns of the sums over one segment of a long list."""
    program = tl.program_id(0)
    segment = program % num_segments
    begin, end = tl.load(segment_begin + segment), tl.load(segment_end + segment)
    if begin < end:
        column = program // num_segments * block_d + tl.arange(0, block_d)
        gate_sum, up_sum, down_sum = _sum_list(
            begin,
            end,
            column,
            tokens,
            up_bars,
            gate_bars,
            hiddens,
            x,
            y_bar,
            width,
            block_d,
            group,
            gated,
        )
        has_column = column < width
        at = sums + segment.to(tl.int64) * (3 * width) + column
        tl.store(at, up_sum, mask=has_column)
        tl.store(at + width, down_sum, mask=has_column)
        if gated:
            tl.store(at + 2 * width, gate_sum, mask=has_column)


@triton.jit
def weight_gradients(
    neuron_offsets,
    first_segment,
    sums,
    tokens,
    up_bars,
    gate_bars,
    hiddens,
    x,
    y_bar,
    gate_start,
    up_start,
    down_start,
    dw_gate,
    dw_up,
    dw_down,
    num_neurons: tl.constexpr,
    width: tl.constexpr,
    block_d: tl.constexpr,
    group: tl.constexpr,
    segment: tl.constexpr,
    gated: tl.constexpr,
    has_start: tl.constexpr,
):
    """`block_d` columns of the gradients of one neuron.

    A list longer than `segment` was summed by `sum_segments`: its sums are added in order.
    All neurons go through some columns before the next ones, so that these columns of x and
    y_bar stay in the L2.
    """
    program = tl.program_id(0)
    neuron = program % num_neurons
    column = program // num_neurons * block_d + tl.arange(0, block_d)
    has_column = column < width
    begin, end = tl.load(neuron_offsets + neuron), tl.load(neuron_offsets + neuron + 1)
    is_long = end - begin > segment
    gate_sum, up_sum, down_sum = _sum_list(
        begin,
        tl.where(is_long, begin, end),
        column,
        tokens,
        up_bars,
        gate_bars,
        hiddens,
        x,
        y_bar,
        width,
        block_d,
        group,
        gated,
    )
    number = tl.where(is_long, (end - begin + segment - 1) // segment, 0)
    at = sums + tl.load(first_segment + neuron).to(tl.int64) * (3 * width) + column
    for _ in range(0, number):
        up_sum += tl.load(at, mask=has_column, other=0)
        down_sum += tl.load(at + width, mask=has_column, other=0)
        if gated:
            gate_sum += tl.load(at + 2 * width, mask=has_column, other=0)
        at += 3 * width
    at = neuron.to(tl.int64) * width + column
    if has_start:
        up_sum += tl.load(up_start + at, mask=has_column, other=0)
        down_sum += tl.load(down_start + at, mask=has_column, other=0)
        if gated:
            gate_sum += tl.load(gate_start + at, mask=has_column, other=0)
    tl.store(dw_up + at, up_sum.to(tl.bfloat16), mask=has_column)
    tl.store(dw_down + at, down_sum.to(tl.bfloat16), mask=has_column)
    if gated:
        tl.store(dw_gate + at, gate_sum.to(tl.bfloat16), mask=has_column)
