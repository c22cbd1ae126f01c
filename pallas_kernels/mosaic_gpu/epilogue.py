"""Packs a tile of a matmul's accumulator, in registers, into words in shared memory.

In the layout of a wgmma accumulator four neighbouring lanes share a row, and each of them
holds pairs of neighbouring columns. A lane marks the active neurons of its part of a row in
a bit mask; a prefix sum over the four lanes gives it its first slot. Then it visits the few
bits that are set. As registers cannot be addressed by a number, the lane keeps its rounded
values of a row in shared memory, too, where no other thread reads them. The order of the
entries is fixed: by lane, then even columns, then odd ones.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector
from jaxlib.mlir.dialects import math as mathdialect

# relu, rounding to bf16 and packing of a pair in one instruction; NaN stays NaN. The sign
# bits are cleared because an active neuron is told from zero by its bits, and -0 has one.
_TO_BF16_PAIR = "{ .reg .b32 p; cvt.rn.relu.bf16x2.f32 p, $2, $1; and.b32 $0, p, 0x7fff7fff; }"

# Marks pair {number} in a mask: bit {number} for its low half, 16 bits on for its high one.
_MARK_PAIR = """{{
  .reg .b32 some, ones;
  mov.b32 ones, 0x00010001;
  min.u16x2 some, $2, ones;
  mad.lo.u32 $0, some, {bit}, $1;
}}"""

_KEEP_PAIRS = "st.shared.v4.b32 [$0], {$1, $2, $3, $4};"

# Visits the marked pairs of a row. $0: mask. $1: first slot of this lane. $2: end of the
# slots. $3: where this lane keeps the pairs of the row. $4: neuron of its first column.
# $5: address of the firing counter of that column. $6: what to add to it.
_STORE_MARKED = """{{
  .reg .pred none, high, fits; .reg .b32 mask, bit, pair, column, place, part, entry, slot;
  mov.b32 mask, $0; mov.b32 slot, $1;
LOOP${{:uid}}:
  setp.eq.u32 none, mask, 0;
  @none bra DONE${{:uid}};
  brev.b32 bit, mask;
  clz.b32 bit, bit;
  sub.u32 part, mask, 1;
  and.b32 mask, mask, part;
  and.b32 pair, bit, 15;
  setp.gt.u32 high, bit, 15;
  shr.u32 place, pair, 2;
  mad.lo.u32 place, place, {stride}, $3;
  and.b32 part, pair, 3;
  mad.lo.u32 place, part, 4, place;
  ld.shared.b32 entry, [place];
  shl.b32 column, pair, 3;
  @high add.u32 column, column, 1;
  @high and.b32 entry, entry, 0xffff0000;
  @!high shl.b32 entry, entry, 16;
  add.u32 entry, entry, column;
  add.u32 entry, entry, $4;
  setp.lt.u32 fits, slot, $2;
  @fits st.shared.u32 [slot], entry;
  add.u32 slot, slot, 4;
  mad.lo.u32 place, column, 4, $5;
  red.shared.add.u32 [place], $6;
  bra LOOP${{:uid}};
DONE${{:uid}}:
}}"""

_STORE_IF = "{ .reg .pred p; setp.ne.u32 p, $2, 0; @p st.shared.u32 [$0], $1; }"


# Bytes between groups of four pairs of a thread: those of the other threads lie between, so
# that a warp's accesses touch all banks.
_KEPT_STRIDE = 16 * utils.WARPGROUP_SIZE


def kept_shape(tile: int) -> tuple[int, ...]:
    """Shape of the int32 scratch that `pack_tile` needs: the pairs of one row of each thread."""
    return (tile // 32, utils.WARPGROUP_SIZE, 4)


def _shared_address(ref):
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(ref))


def _rows_of_thread(acc):
    """The registers of a thread by row: [(row, [register])], in the order of their columns.

    A register is a vector of two neighbouring columns. Lane l of the four that share a row
    holds columns `8 i + 2 l` and `8 i + 2 l + 1` in register i of a row.
    """
    rows = {}
    places = acc.layout.thread_idxs(acc.shape)
    for register, (row, _) in zip(np.ndindex(acc.registers.shape), places, strict=True):
        # Registers that differ in the tile of columns alone are of the same row.
        key = tuple(n for axis, n in enumerate(register) if axis != 1)
        rows.setdefault(key, (row, []))[1].append(acc.registers[register])
    return rows.values()


def _emit(acc, words, fired, pairs_kept, token_weight, first_row, first_neuron, num_neurons):
    i32 = ir.IntegerType.get_signless(32)

    def const(value):
        return arith.constant(i32, value)

    def ptx(code, *args):
        return utils.inline_ptx(code, *args, result_types=i32, has_side_effects=False)

    width = ir.MemRefType(words.type).shape[1]
    words_address, fired_address = _shared_address(words), _shared_address(fired)
    thread = arith.remui(utils.thread_idx(), const(utils.WARPGROUP_SIZE))
    lane = arith.andi(thread, const(3))
    is_first = arith.extui(i32, arith.cmpi(arith.CmpIPredicate.eq, lane, const(0)))
    lane_neuron = arith.addi(first_neuron, arith.muli(lane, const(2)))
    lane_counter = arith.addi(fired_address, arith.muli(lane, const(8)))
    utils.inline_ptx(
        "st.shared.u32 [$0], $1;",
        arith.addi(fired_address, arith.muli(thread, const(4))),
        const(0),
    )
    utils.warpgroup_barrier()

    def half(register, position):
        return vector.extract(
            register,
            dynamic_position=[],
            static_position=ir.DenseI64ArrayAttr.get([position]),
        )

    def first_bits(number):
        """The lower `number` bits, at most 16 of them."""
        number = arith.minsi(arith.maxsi(number, const(0)), const(16))
        return arith.subi(arith.shli(const(1), number), const(1))

    # Columns past the last neuron hold products with zeros, which for a token with a NaN or
    # inf are NaN. Pair i of a lane is columns 8 i + 2 lane and the next one.
    columns_left = arith.subi(const(num_neurons), lane_neuron)
    low = first_bits(arith.shrsi(arith.addi(columns_left, const(7)), const(3)))
    high = first_bits(arith.shrsi(arith.addi(columns_left, const(6)), const(3)))
    real_columns = arith.ori(low, arith.shli(high, const(16)))

    kept = arith.addi(_shared_address(pairs_kept), arith.muli(thread, const(16)))
    for row, registers in _rows_of_thread(acc):
        row_in_matrix = arith.addi(row, arith.index_cast(ir.IndexType.get(), first_row))
        weight = memref.load(token_weight, [row_in_matrix])
        pairs, mask = [], const(0)
        for register in registers:
            pairs.append(ptx(_TO_BF16_PAIR, half(register, 0), half(register, 1)))
            mask = ptx(_MARK_PAIR.format(bit=1 << (len(pairs) - 1)), mask, pairs[-1])
        for first in range(0, len(pairs), 4):
            address = arith.addi(kept, const(first // 4 * _KEPT_STRIDE))
            utils.inline_ptx(_KEEP_PAIRS, address, *pairs[first : first + 4])
        mask = arith.andi(mask, real_columns)
        count = mathdialect.ctpop(mask)
        # Exclusive prefix over the four lanes, and the total.
        neighbour = utils.shfl_bfly(count, 1)
        is_odd = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(lane, const(1)), const(0))
        before = arith.select(is_odd, neighbour, const(0))
        of_two = arith.addi(count, neighbour)
        of_others = utils.shfl_bfly(of_two, 2)
        is_upper = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(lane, const(2)), const(0))
        before = arith.addi(before, arith.select(is_upper, of_others, const(0)))
        total = arith.addi(of_two, of_others)

        row_address = arith.addi(
            words_address, arith.muli(arith.index_cast(i32, row), const(4 * width))
        )
        utils.inline_ptx(_STORE_IF, row_address, total, is_first)
        utils.inline_ptx(
            _STORE_MARKED.format(stride=_KEPT_STRIDE),
            mask,
            arith.addi(row_address, arith.muli(arith.addi(before, const(1)), const(4))),
            arith.addi(row_address, const(4 * width)),
            kept,
            lane_neuron,
            lane_counter,
            weight,
        )


def pack_tile(
    acc, words_ref, fired_ref, kept_ref, token_weight_ref, first_row, first_neuron, num_neurons
):
    """Packs `relu(acc)`, rounded to bf16, from a wgmma accumulator.

    Args:
      acc: f32 `[tile_m, tile]`.
      words_ref: int32 `[tile_m, slots + 1]` in shared memory, see `words`.
      fired_ref: int32 `[tile]` in shared memory: the sum of the weights of the tokens on
        which a neuron was active. `tile` is 128, the threads of a warpgroup.
      kept_ref: int32 scratch of `kept_shape` in shared memory.
      token_weight_ref: int32 `[rows]` in global memory, 0 or 1.
      first_row: int32, of this tile in the matrix.
      first_neuron: int32, of this tile in the matrix.
      num_neurons: neurons of the matrix, a Python number: columns past them are not packed.
    """

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.Layout.WGMMA,
            plgpu.RefType(),
            plgpu.RefType(),
            plgpu.RefType(),
            plgpu.RefType(),
            plgpu.Layout.WG_SPLAT,
            plgpu.Layout.WG_SPLAT,
        )
    )
    def emit(_, acc, words, fired, kept, token_weight, first_row, first_neuron):
        _emit(
            acc,
            words,
            fired,
            kept,
            token_weight,
            first_row.registers.item(),
            first_neuron.registers.item(),
            num_neurons,
        )

    emit(acc, words_ref, fired_ref, kept_ref, token_weight_ref, first_row, first_neuron)


def _entry_order(tile: int) -> jax.Array:
    """The order in which the lanes of a row store the columns of a tile."""
    lane, place = jnp.divmod(jnp.arange(tile, dtype=jnp.int32), tile // 4)
    odd, number = jnp.divmod(place, tile // 8)
    return number * 8 + lane * 2 + odd


def pack_tile_interpreted(
    acc, words_ref, fired_ref, kept_ref, token_weight_ref, first_row, first_neuron, num_neurons
):
    """`pack_tile` in plain JAX, for the interpreter, which cannot run inline code."""
    del kept_ref
    tile_m, tile = acc.shape
    slots = words_ref.shape[-1] - 1
    gate = jax.nn.relu(acc).astype(jnp.bfloat16)
    order = _entry_order(tile)
    gate = gate[:, order]
    active = (gate != 0) & (order + first_neuron < num_neurons)
    count = jnp.sum(active, axis=1, dtype=jnp.int32)
    place = jnp.argsort(~active, axis=1, stable=True)[:, :slots]
    value = jnp.take_along_axis(gate, place, axis=1).astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(value, jnp.int32)
    words_ref[...] = jnp.concatenate([count[:, None], bits | (order[place] + first_neuron)], axis=1)
    weight = token_weight_ref[pl.ds(first_row, tile_m)]
    counted = jnp.sum(active * weight[:, None], axis=0, dtype=jnp.int32)
    fired_ref[...] = jnp.zeros(tile, jnp.int32).at[order].set(counted)
