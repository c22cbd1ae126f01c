"""Launches of the backward kernels: lists by neuron, then the gradients.

Bytes: the token kernel reads `6 D` for every (token, neuron) pair, rows of the three weights,
nearly all from the L2; the weight kernel `4 D`, rows of x and y_bar, in columns that fit the
L2. Both are bound by that, not by the FLOPs.

`backward_kernels` is imported where it is needed, because it imports triton.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.triton_gpu.call import call
from pallas_kernels.triton_gpu.launch import Lists, padded

# Tokens after which the sum of a neuron's list is cut.
SEGMENT = 1024

# Columns that one warp sums: 16 bytes a thread.
_BLOCK_D = 256

# Entries that one warp takes at a time where there is one thread for each.
_GROUP = 32


class ByNeuron(NamedTuple):
    """The pairs of `Lists`, ordered by neuron, then by token.

    Attributes:
      places: int32 `[capacity]`, where every entry of the lists by row stands here.
      tokens: int32 `[capacity]`, the rows.
      offsets: int32 `[H + 1]`: the list of neuron j is `tokens[offsets[j]:offsets[j + 1]]`.
    """

    places: jax.Array
    tokens: jax.Array
    offsets: jax.Array


def _out(shape, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(shape, dtype)


def regroup(lists: Lists, num_neurons: int) -> ByNeuron:
    """The lists by neuron."""
    from pallas_kernels.triton_gpu import backward_kernels as kernels

    rows = len(lists.offsets) - 1
    words_of_block = kernels.WORDS_OF_BLOCK.value
    blocks = -(-rows // (32 * words_of_block))
    (marks,) = call(
        kernels.mark_pairs,
        *lists,
        out_type=(_out((blocks * words_of_block, num_neurons)),),
        zeroed=True,
        grid=(rows,),
        num_warps=1,
        num_neurons=num_neurons,
        group=_GROUP,
    )
    block_n = 32
    before, totals = call(
        kernels.count_marks,
        marks,
        out_type=(_out((blocks, num_neurons)), _out((num_neurons,))),
        grid=(-(-num_neurons // block_n),),
        num_warps=8,
        num_blocks=blocks,
        num_neurons=num_neurons,
        block_n=block_n,
        blocks_at_once=min(padded(blocks), 256),
    )
    offsets = jnp.pad(jnp.cumsum(totals, dtype=jnp.int32), (1, 0))
    places, tokens = call(
        kernels.place_pairs,
        *lists,
        marks,
        before,
        offsets,
        out_type=(_out(lists.entries.shape), _out(lists.entries.shape)),
        grid=(rows,),
        num_warps=1,
        num_neurons=num_neurons,
        group=_GROUP,
    )
    return ByNeuron(places, tokens, offsets)


def _segments(offsets, capacity: int):
    """(begin and end of every segment of the long lists, first segment of every neuron)."""
    lengths = offsets[1:] - offsets[:-1]
    number = jnp.where(lengths > SEGMENT, -(-lengths // SEGMENT), 0)
    first = jnp.cumsum(number) - number
    # A long list has more than one full segment, so there are at most twice as many as full ones.
    count = max(2 * capacity // SEGMENT, 1)
    neuron = jnp.repeat(jnp.arange(len(lengths)), number, total_repeat_length=count)
    segment = jnp.arange(count, dtype=jnp.int32)
    begin = offsets[neuron] + (segment - first[neuron]) * SEGMENT
    end = jnp.minimum(begin + SEGMENT, offsets[neuron + 1])
    exists = segment < jnp.sum(number)
    return jnp.where(exists, begin, 0), jnp.where(exists, end, 0), first.astype(jnp.int32)


def gradients(lists: Lists, l1_scale, x, y_bar, w_gate, w_up, w_down, dx_start, dw_start):
    """Gradients of the layer over the pairs of `lists`.

    Args:
      lists: the gates g, or h without a gate.
      l1_scale: f32 `[M]`, the derivative by the L1 norm of h of each row.
      x, y_bar: bf16 `[M, D]`.
      w_gate, w_up, w_down: bf16 `[H, D]`; w_gate may be None.
      dx_start: what dx starts from, bf16 `[M, D]`; None for 0.
      dw_start: what the weight gradients start from, f32 `[H, D]` by weight; None for 0.

    Returns:
      dx `[M, D]`, its start where a list is empty, and those of the weights, all bf16.
    """
    from pallas_kernels.triton_gpu import backward_kernels as kernels

    (rows, width), neurons = x.shape, len(w_up)
    gated = w_gate is not None
    by_neuron = regroup(lists, neurons)
    of_pairs = _out(lists.entries.shape, jnp.bfloat16)
    dx, up_bars, gate_bars, hiddens = call(
        kernels.token_gradients,
        *lists,
        by_neuron.places,
        l1_scale,
        x,
        y_bar,
        # What is not there is not read; every argument must be an array.
        w_gate if gated else w_up,
        w_up,
        w_down,
        x if dx_start is None else dx_start,
        out_type=(_out(x.shape, jnp.bfloat16), of_pairs, of_pairs, of_pairs),
        grid=(rows,),
        num_warps=min(max(padded(width) // 512, 1), 16),
        width=width,
        width_padded=padded(width),
        group=2,
        gated=gated,
        has_start=dx_start is not None,
    )
    pairs = (by_neuron.tokens, up_bars, gate_bars, hiddens, x, y_bar)
    begin, end, first = _segments(by_neuron.offsets, len(lists.entries))
    columns = -(-width // _BLOCK_D)
    sizes = {"width": width, "block_d": _BLOCK_D, "group": 8, "gated": gated}
    (sums,) = call(
        kernels.sum_segments,
        begin,
        end,
        *pairs,
        out_type=(_out((len(begin), 3, width), jnp.float32),),
        grid=(len(begin) * columns,),
        num_warps=1,
        num_segments=len(begin),
        **sizes,
    )
    # Not read without a start.
    starts = (w_up,) * 3 if dw_start is None else tuple(w for w in dw_start if w is not None)
    of_weight = _out(w_up.shape, jnp.bfloat16)
    dw_gate, dw_up, dw_down = call(
        kernels.weight_gradients,
        by_neuron.offsets,
        first,
        sums,
        *pairs,
        *(starts if len(starts) == 3 else (starts[0], *starts)),
        out_type=(of_weight, of_weight, of_weight),
        grid=(neurons * columns,),
        num_warps=1,
        num_neurons=neurons,
        segment=SEGMENT,
        has_start=dw_start is not None,
        **sizes,
    )
    return dx, dw_gate if gated else None, dw_up, dw_down
