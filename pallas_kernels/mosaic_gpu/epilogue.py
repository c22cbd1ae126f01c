"""Packs a tile of a matmul's accumulator, in registers, into words in shared memory.

In the layout of a wgmma accumulator four neighbouring lanes share a row, and each of them
holds pairs of neighbouring columns. A lane counts the active neurons of its part of a row,
a prefix sum over the four lanes gives it its first slot, and it stores its entries from
there on. So the order of the entries is fixed: by lane, then by column.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

# relu, rounding to bf16 and packing of a pair in one instruction; NaN stays NaN. The sign
# bits are cleared because an active neuron is told from zero by its bits, and -0 has one.
_TO_BF16_PAIR = (
    "{ .reg .b32 p; cvt.rn.relu.bf16x2.f32 p, $2, $1; and.b32 $0, p, 0x7fff7fff; }"
)

# Number of non-zero halves: in each half of $0 those of that half of the pairs so far.
_COUNT_PAIR = "{ .reg .b32 p; min.u16x2 p, $2, 0x00010001; add.u16x2 $0, $1, p; }"

# $0: address of the next slot. $1: the same, before. $2: pair. $3: neuron of the low half.
# $4: end of the slots. $5: address of the counter of its firing. $6: what to add there.
# Most pairs are zero, so that a warp often skips all of it.
_STORE_PAIR = """{
  .reg .pred active, fits, none; .reg .b32 entry, slot;
  mov.b32 slot, $1;
  setp.eq.u32 none, $2, 0;
  @none bra DONE${:uid};
  shl.b32 entry, $2, 16;
  setp.ne.u32 active, entry, 0;
  setp.lt.and.u32 fits, slot, $4, active;
  or.b32 entry, entry, $3;
  @fits st.shared.u32 [slot], entry;
  @active add.u32 slot, slot, 4;
  @active red.shared.add.u32 [$5], $6;
  and.b32 entry, $2, 0xffff0000;
  setp.ne.u32 active, entry, 0;
  setp.lt.and.u32 fits, slot, $4, active;
  or.b32 entry, entry, $3;
  add.u32 entry, entry, 1;
  @fits st.shared.u32 [slot], entry;
  @active add.u32 slot, slot, 4;
  @active red.shared.add.u32 [$5+4], $6;
DONE${:uid}:
  mov.b32 $0, slot;
}"""

_STORE_IF = "{ .reg .pred p; setp.ne.u32 p, $2, 0; @p st.shared.u32 [$0], $1; }"


def _shared_address(ref):
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(ref))


def _rows_of_thread(acc):
    """The registers of a thread, grouped by row: [(row, [(register, column)])].

    A register is a vector of two neighbouring columns.
    """
    rows = {}
    places = acc.layout.thread_idxs(acc.shape)
    for register, (row, column) in zip(np.ndindex(acc.registers.shape), places, strict=True):
        # Registers that differ in the tile of columns alone are of the same row.
        key = tuple(n for axis, n in enumerate(register) if axis != 1)
        rows.setdefault(key, (row, []))[1].append((acc.registers[register], column))
    return rows.values()


def _emit(acc, words, fired, token_weight, first_row, first_neuron):
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

    for row, registers in _rows_of_thread(acc):
        row_in_matrix = arith.addi(row, arith.index_cast(ir.IndexType.get(), first_row))
        weight = memref.load(token_weight, [row_in_matrix])
        pairs, count = [], const(0)
        for register, column in registers:
            pair = ptx(_TO_BF16_PAIR, half(register, 0), half(register, 1))
            count = ptx(_COUNT_PAIR, count, pair)
            pairs.append((pair, arith.index_cast(i32, column)))
        count = arith.addi(arith.andi(count, const(0xFFFF)), arith.shrui(count, const(16)))
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
        slot = arith.addi(row_address, arith.muli(arith.addi(before, const(1)), const(4)))
        end = arith.addi(row_address, const(4 * width))
        for pair, column in pairs:
            slot = utils.inline_ptx(
                _STORE_PAIR,
                slot,
                pair,
                arith.addi(column, first_neuron),
                end,
                arith.addi(fired_address, arith.muli(column, const(4))),
                weight,
                result_types=i32,
                has_side_effects=True,
            )


def pack_tile(acc, words_ref, fired_ref, token_weight_ref, first_row, first_neuron):
    """Packs `relu(acc)`, rounded to bf16, from a wgmma accumulator.

    Args:
      acc: f32 `[tile_m, tile]`.
      words_ref: int32 `[tile_m, slots + 1]` in shared memory, see `words`.
      fired_ref: int32 `[tile]` in shared memory: the sum of the weights of the tokens on
        which a neuron was active. `tile` is 128, the threads of a warpgroup.
      token_weight_ref: int32 `[rows]` in global memory, 0 or 1.
      first_row: int32, of this tile in the matrix.
      first_neuron: int32, of this tile in the matrix.
    """

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.Layout.WGMMA,
            plgpu.RefType(),
            plgpu.RefType(),
            plgpu.RefType(),
            plgpu.Layout.WG_SPLAT,
            plgpu.Layout.WG_SPLAT,
        )
    )
    def emit(_, acc, words, fired, token_weight, first_row, first_neuron):
        _emit(
            acc,
            words,
            fired,
            token_weight,
            first_row.registers.item(),
            first_neuron.registers.item(),
        )

    emit(acc, words_ref, fired_ref, token_weight_ref, first_row, first_neuron)


def _entry_order(tile: int) -> jax.Array:
    """The order in which the lanes of a row store the columns of a tile."""
    lane, place = jnp.divmod(jnp.arange(tile, dtype=jnp.int32), tile // 4)
    return place // 2 * 8 + lane * 2 + place % 2


def pack_tile_interpreted(acc, words_ref, fired_ref, token_weight_ref, first_row, first_neuron):
    """`pack_tile` in plain JAX, for the interpreter, which cannot run inline code."""
    tile_m, tile = acc.shape
    slots = words_ref.shape[-1] - 1
    gate = jax.nn.relu(acc).astype(jnp.bfloat16)
    order = _entry_order(tile)
    gate = gate[:, order]
    active = gate != 0
    count = jnp.sum(active, axis=1, dtype=jnp.int32)
    place = jnp.argsort(~active, axis=1, stable=True)[:, :slots]
    value = jnp.take_along_axis(gate, place, axis=1).astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(value, jnp.int32)
    words_ref[...] = jnp.concatenate(
        [count[:, None], bits | (order[place] + first_neuron)], axis=1
    )
    weight = token_weight_ref[pl.ds(first_row, tile_m)]
    counted = jnp.sum(active * weight[:, None], axis=0, dtype=jnp.int32)
    fired_ref[...] = jnp.zeros(tile, jnp.int32).at[order].set(counted)

