"""Matmul with packing: `relu(x w')` goes from the accumulators into TwELL words.

Persistent and warp-specialised: one warpgroup feeds tiles of x and w by TMA, two compute.
Both share the rows of x; each has a tile of 128 neurons of its own, which it packs while
the next tiles are on their way.

Bytes and FLOPs: `2 M H D` FLOPs, which bound it on a Hopper GPU; x and w once or a few
times from memory, and `4 M (slots + 1) H / tile` bytes of words instead of `2 M H` of a dense
gate.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu.device import num_sms
from pallas_kernels.mosaic_gpu.epilogue import kept_shape, pack_tile, pack_tile_interpreted
from pallas_kernels.shapes import varying
from pallas_kernels.words import num_tiles

# Neurons of a tile: one warpgroup packs 128 columns with 128 threads.
TILE = 128

# More do not fit the shared memory beside three stages of the pipeline.
MAX_SLOTS = 63


@dataclasses.dataclass(frozen=True)
class GateConfig:
    """How the kernel is cut up.

    Attributes:
      tile_m: tokens of a block.
      tile_k: elements of D of a pipeline stage.
      stages: depth of the pipeline.
      slots: entries of a (row, tile), up to `MAX_SLOTS`; `slots + 1` words must be a multiple
        of 16 bytes.
      grid_width: neighbouring blocks of rows that run together, so that they share tiles
        of w in the L2.
    """

    tile_m: int = 128
    tile_k: int = 64
    stages: int = 3
    slots: int = 15
    grid_width: int = 4

    def __post_init__(self):
        if not 0 < self.slots <= MAX_SLOTS or (self.slots + 1) % 4:
            raise ValueError(f"slots: must be 3, 7, ... {MAX_SLOTS}, got {self.slots}")


def _kernel(
    x_ref,
    w_ref,
    weight_ref,
    words_ref,
    fired_ref,
    *,
    num_neurons: int,
    config: GateConfig,
    interpret: bool,
):
    rows, neurons, depth = x_ref.shape[0], w_ref.shape[0], x_ref.shape[1]
    tile_m, tile_k = config.tile_m, config.tile_k
    width = config.slots + 1
    block_n = 2 * TILE
    grid_m, grid_n = pl.cdiv(rows, tile_m), pl.cdiv(neurons, block_n)
    swizzle = plgpu.find_swizzle(8 * jnp.dtype(x_ref.dtype).itemsize * tile_k)
    transforms = (
        plgpu.TilingTransform((8, swizzle // jnp.dtype(x_ref.dtype).itemsize)),
        plgpu.SwizzleTransform(swizzle),
    )

    def pipeline(body, context):
        return plgpu.emit_pipeline_warp_specialized(
            body,
            grid=(depth // tile_k,),
            memory_registers=40,
            in_specs=[
                plgpu.BlockSpec((tile_m, tile_k), lambda k: (0, k), transforms=transforms),
                plgpu.BlockSpec((block_n, tile_k), lambda k: (0, k), transforms=transforms),
            ],
            wg_axis="wg",
            num_compute_wgs=2,
            max_concurrent_steps=config.stages,
            compute_context=context,
        )

    def nothing(*_, **__):
        return None

    @functools.partial(
        pl.run_scoped,
        allocations=pipeline(nothing, nothing).get_allocations(x_ref, w_ref),
        words_smem=plgpu.SMEM((2, tile_m, width), jnp.int32),
        fired_smem=plgpu.SMEM((2, TILE), jnp.int32),
        kept_smem=plgpu.SMEM((2, *kept_shape(TILE)), jnp.int32),
        collective_axes="wg",
    )
    def _(allocations, words_smem, fired_smem, kept_smem):
        wg = lax.axis_index("wg")

        @plgpu.nd_loop((grid_m * grid_n,), collective_axes="sm")
        def _(loop):
            block_row, block_column = plgpu.planar_snake(
                loop.index[0], (grid_m, grid_n), 0, config.grid_width
            )

            def compute(run_pipeline):
                @functools.partial(pl.run_scoped, acc_ref=plgpu.ACC((tile_m, TILE), jnp.float32))
                def _(acc_ref):
                    run_pipeline(acc_ref)
                    acc = acc_ref[...]
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    tile = 2 * block_column + wg
                    emit = pack_tile_interpreted if interpret else pack_tile
                    emit(
                        acc,
                        words_smem.at[wg],
                        fired_smem.at[wg],
                        kept_smem.at[wg],
                        weight_ref,
                        (block_row * tile_m).astype(jnp.int32),
                        (tile * TILE).astype(jnp.int32),
                        num_neurons,
                    )
                    plgpu.commit_smem()

                    # The second tile of a block may lie past the last one. A copy there would
                    # not be dropped: where it is contiguous, it goes to the rows that follow.
                    @pl.when(tile < num_tiles(num_neurons, TILE))
                    def _():
                        plgpu.copy_smem_to_gmem(
                            words_smem.at[wg],
                            words_ref.at[
                                pl.ds(block_row * tile_m, tile_m), pl.ds(tile * width, width)
                            ],
                        )
                        plgpu.copy_smem_to_gmem(
                            fired_smem.at[wg], fired_ref.at[block_row, pl.ds(tile * TILE, TILE)]
                        )

            def multiply(_, x_smem, w_smem, acc_ref):
                plgpu.wgmma(acc_ref, x_smem, w_smem.at[pl.ds(wg * TILE, TILE)].T)
                plgpu.wgmma_wait(0)
                return acc_ref

            pipeline(multiply, compute)(
                x_ref.at[pl.ds(block_row * tile_m, tile_m), :],
                w_ref.at[pl.ds(block_column * block_n, block_n), :],
                allocations=allocations,
            )

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def gate_words(
    x: jax.Array,
    w: jax.Array,
    token_mask: jax.Array | None,
    *,
    config: GateConfig,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Packs `relu(x w')`, rounded to bf16.

    Args:
      x: bf16 `[M, D]`, D a multiple of `tile_k`.
      w: bf16 `[H, D]`.
      token_mask: bool `[M]`, True for the tokens that `fired` counts; None for all.
      config: of the kernel.
      interpret: runs it in the interpreter.

    Returns:
      words, int32 `[M, num_tiles, slots + 1]`, see `words`; and `fired`, int32 `[H]`, the
      number of counted tokens on which a neuron was active.
    """
    rows, neurons = x.shape[0], w.shape[0]
    grid_m = pl.cdiv(rows, config.tile_m)
    tiles = num_tiles(neurons, TILE)
    weight = jnp.ones(rows, jnp.int32) if token_mask is None else token_mask.astype(jnp.int32)
    weight = jnp.pad(weight, (0, grid_m * config.tile_m - rows))
    # Operands of TMA are tiled by 8 rows.
    x, w = (jnp.pad(array, ((0, -array.shape[0] % 8), (0, 0))) for array in (x, w))
    words, fired = plgpu.kernel(
        functools.partial(
            _kernel, num_neurons=neurons, config=config, interpret=interpret is not None
        ),
        out_type=(
            jax.ShapeDtypeStruct((rows, tiles * (config.slots + 1)), jnp.int32),
            jax.ShapeDtypeStruct((grid_m, tiles * TILE), jnp.int32),
        ),
        grid=(num_sms(),),
        grid_names=("sm",),
        num_threads=3,
        thread_name="wg",
        interpret=interpret,
    )(x, w, weight)
    words, fired = varying((words, fired), (x, w, weight))
    words = words.reshape(rows, tiles, config.slots + 1)
    return words, jnp.sum(fired, axis=0)[:neurons]
