"""Sums over the rows that a warpgroup holds in registers, several with one barrier.

Mosaic's own reduction has two barriers for every scalar.
"""

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

NUM_WARPS = 4


def _emit(rows, sums):
    i32 = ir.IntegerType.get_signless(32)

    def const(value):
        return arith.constant(i32, value)

    thread = arith.remui(utils.thread_idx(), const(utils.WARPGROUP_SIZE))
    warp = arith.shrui(thread, const(5))
    lane = arith.andi(thread, const(31))
    is_first = arith.extui(i32, arith.cmpi(arith.CmpIPredicate.eq, lane, const(0)))
    address = llvm.ptrtoint(i32, utils.memref_ptr(sums))
    address = arith.addi(address, arith.muli(warp, const(4)))
    for number, row in enumerate(rows):
        total = None
        for register in row.registers.flat:
            for place in range(ir.VectorType(register.type).shape[0]):
                value = vector.extract(
                    register,
                    dynamic_position=[],
                    static_position=ir.DenseI64ArrayAttr.get([place]),
                )
                total = value if total is None else arith.addf(total, value)
        total = utils.warp_tree_reduce(total, arith.addf, 32)
        utils.inline_ptx(
            "{ .reg .pred p; setp.ne.u32 p, $2, 0; @p st.shared.f32 [$0], $1; }",
            arith.addi(address, const(4 * NUM_WARPS * number)),
            total,
            is_first,
        )
    utils.warpgroup_barrier()


def warp_sums(rows, layout, sums_ref) -> None:
    """Sums every row over each warp's part of it.

    Args:
      rows: list of f32 arrays `[D]`.
      layout: theirs, which spreads them over the threads of a warpgroup.
      sums_ref: f32 `[len(rows), NUM_WARPS]` in shared memory, to be written; may be read when
        this returns. The sum of a row is that of its `NUM_WARPS` values.
    """

    @plgpu.inline_mgpu(arg_types=(*(layout for _ in rows), plgpu.RefType()))
    def emit(_, *args):
        *rows, sums = args
        _emit(rows, sums)

    emit(*rows, sums_ref)


def warp_sums_interpreted(rows, layout, sums_ref) -> None:
    """`warp_sums` in plain JAX, for the interpreter, which cannot run inline code."""
    del layout
    sums_ref[...] = jnp.stack([jnp.sum(row.reshape(NUM_WARPS, -1), axis=1) for row in rows])
