"""Gathers the entries of a packed row, tile by tile, into two lists in shared memory.

Neuron numbers and values are lists of their own because Mosaic has no bitcast of a scalar.
"""

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from pallas_kernels.words import entry_index, entry_value

# A lane of the first warp copies the entries of one tile. $0, $1: places in the lists of
# numbers and values; $2: address of the entries; $3: how many of them.
_COPY_ENTRIES = """{
  .reg .pred more; .reg .b32 number, value, source, left, word, half;
  mov.b32 number, $0; mov.b32 value, $1; mov.b32 source, $2; mov.b32 left, $3;
LOOP${:uid}:
  setp.gt.s32 more, left, 0;
  @!more bra DONE${:uid};
  ld.shared.b32 word, [source];
  and.b32 half, word, 0xffff;
  st.shared.b32 [number], half;
  and.b32 half, word, 0xffff0000;
  st.shared.b32 [value], half;
  add.u32 source, source, 4; add.u32 number, number, 4; add.u32 value, value, 4;
  sub.s32 left, left, 1;
  bra LOOP${:uid};
DONE${:uid}:
}"""

_LOAD = "ld.shared.b32 $0, [$1];"


def _shared_address(ref):
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(ref))


def _emit(words, indices, values, length):
    i32 = ir.IntegerType.get_signless(32)

    def const(value):
        return arith.constant(i32, value)

    def load(address):
        return utils.inline_ptx(_LOAD, address, result_types=i32, has_side_effects=True)

    num_tiles, width = ir.MemRefType(words.type).shape
    words_address, length_address = _shared_address(words), _shared_address(length)
    indices_address, values_address = _shared_address(indices), _shared_address(values)
    thread = arith.remui(utils.thread_idx(), const(utils.WARPGROUP_SIZE))
    in_first_warp = arith.cmpi(arith.CmpIPredicate.ult, thread, const(32))
    # All threads are done with the list of the row before.
    utils.warpgroup_barrier()
    branch = scf.IfOp(in_first_warp)
    with ir.InsertionPoint(branch.then_block):
        base, overflow = const(0), const(0)
        for first_tile in range(0, num_tiles, 32):
            tile = arith.addi(thread, const(first_tile))
            inside = arith.cmpi(arith.CmpIPredicate.ult, tile, const(num_tiles))
            clamped = arith.select(inside, tile, const(num_tiles - 1))
            address = arith.addi(words_address, arith.muli(clamped, const(4 * width)))
            count = arith.select(inside, load(address), const(0))
            kept = arith.minui(count, const(width - 1))
            overflow = arith.ori(overflow, arith.subi(count, kept))
            # Inclusive prefix sum of `kept` over the lanes.
            upto = kept
            for distance in (1, 2, 4, 8, 16):
                other = utils.inline_ptx(
                    f"shfl.sync.up.b32 $0, $1, {distance}, 0, 0xffffffff;",
                    upto,
                    result_types=i32,
                    has_side_effects=True,
                )
                reaches = arith.cmpi(arith.CmpIPredicate.uge, thread, const(distance))
                upto = arith.addi(upto, arith.select(reaches, other, const(0)))
            before = arith.muli(arith.addi(base, arith.subi(upto, kept)), const(4))
            utils.inline_ptx(
                _COPY_ENTRIES,
                arith.addi(indices_address, before),
                arith.addi(values_address, before),
                arith.addi(address, const(4)),
                kept,
            )
            base = arith.addi(
                base,
                utils.inline_ptx(
                    "shfl.sync.idx.b32 $0, $1, 31, 31, 0xffffffff;",
                    upto,
                    result_types=i32,
                    has_side_effects=True,
                ),
            )
        for distance in (1, 2, 4, 8, 16):
            overflow = arith.ori(overflow, utils.shfl_bfly(overflow, distance))
        fits = arith.cmpi(arith.CmpIPredicate.eq, overflow, const(0))
        utils.inline_ptx(
            "st.shared.b32 [$0], $1;", length_address, arith.select(fits, base, const(0))
        )
        scf.yield_([])
    utils.warpgroup_barrier()


def compact_row(words_ref, indices_ref, values_ref, length_ref):
    """Compacts one row.

    Args:
      words_ref: int32 `[num_tiles, slots + 1]` in shared memory.
      indices_ref: int32 `[num_tiles * slots]` in shared memory, to be written: the neurons
        of the entries that are there, tile by tile. The rest is undefined.
      values_ref: f32, likewise, to be written: the values.
      length_ref: int32 `[1]` in shared memory, to be written: length of the lists, 0 for a
        row that lost entries.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 4)
    def emit(_, *refs):
        _emit(*refs)

    emit(words_ref, indices_ref, values_ref, length_ref)


def compact_row_interpreted(words_ref, indices_ref, values_ref, length_ref):
    """`compact_row` in plain JAX, for the interpreter, which cannot run inline code."""
    tiles = words_ref[...]
    count, entries = tiles[:, 0], tiles[:, 1:]
    slots = entries.shape[1]
    used = (jnp.arange(slots) < count[:, None]).reshape(-1)
    entries = entries.reshape(-1)[jnp.argsort(~used, stable=True)]
    overflow = jnp.any(count > slots)
    length = jnp.where(overflow, 0, jnp.sum(used))
    indices_ref[...] = entry_index(entries)
    values_ref[...] = entry_value(entries)
    length_ref[...] = length.astype(jnp.int32)[None]
