"""The packed matmuls from kernels, with the gradients of the reference."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.reference.packing import matmul_pack_backward, twell_matmul_backward
from pallas_kernels.twell import Twell


def make_matmul_pack(kernel: Callable[..., Twell]) -> Callable[..., Twell]:
    """`matmul_pack` of a backend, see `pallas_kernels.ops`.

    Args:
      kernel: `(x, w, tile, slots) -> Twell`, with x `[M, D]`.
    """

    def matmul_pack(x, w, tile, slots):
        # The kernels have no batch axis: a map over them is a loop.
        @jax.custom_batching.sequential_vmap
        def mapped(x, w):
            return kernel(x.reshape(-1, x.shape[-1]), w, tile, slots)

        return jax.tree.map(lambda leaf: leaf.reshape(*x.shape[:-1], *leaf.shape[1:]), mapped(x, w))

    def forward(x, w, tile, slots):
        twell = matmul_pack(x, w, tile, slots)
        return twell, (x, w, twell)

    differentiable = jax.custom_vjp(matmul_pack, nondiff_argnums=(2, 3))
    differentiable.defvjp(forward, matmul_pack_backward)
    return differentiable


def make_twell_matmul(kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`twell_matmul` of a backend, see `pallas_kernels.ops`.

    Args:
      kernel: `(twell, w) -> [M, D]`, anything in rows that overflowed.
    """

    def twell_matmul(twell, w):
        y = jax.custom_batching.sequential_vmap(kernel)(twell, w)
        y = y.reshape(*twell.shape[:-1], w.shape[1])
        return jnp.where(twell.overflowed[..., None], jnp.nan, y)

    def forward(twell, w):
        return twell_matmul(twell, w), (twell, w)

    differentiable = jax.custom_vjp(twell_matmul)
    differentiable.defvjp(forward, twell_matmul_backward)
    return differentiable
