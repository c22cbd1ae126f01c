"""Weights split over fsdp, gathered where they are used.

They travel in the dtype of the computation, and their gradients are summed over devices in f32.
Left to XLA both can go wrong: it may gather f32 parameters and round them afterwards, and it
sums in whatever dtype the local gradients have.
"""

import functools

import jax
import jax.numpy as jnp

from twell_jax.sharding import RULES, axis_size


def split_columns(weight, token_axes: tuple[str, ...]) -> str | None:
    """The mesh axis over which the last axis of `weight` is split as it is stored, if any.

    It is one of `token_axes`, those over which a `jax.shard_map` splits tokens.
    """
    axis = RULES["embed"]
    divides = axis in token_axes and weight.shape[-1] % axis_size((axis,)) == 0
    return axis if divides else None


def local_weight(weight, dtype, split_axis: str | None, token_axes: tuple[str, ...]) -> jax.Array:
    """For the inside of a `jax.shard_map`: a device's rows of a weight, with all columns.

    Args:
      weight: `[rows, columns]`, the columns split over `split_axis`, if that is not None.
      dtype: that the weight is rounded to.
      split_axis: of `split_columns`.
      token_axes: axes over which the tokens differ: gradients are summed over them.

    Returns:
      f32 `[rows, all columns]`. Its gradient is not rounded.
    """
    weight = weight.astype(jnp.float32)
    # The transpose of pcast is the sum; over `split_axis` it is made as it is scattered.
    if missing := tuple(axis for axis in token_axes if axis != split_axis):
        weight = jax.lax.pcast(weight, missing, to="varying")
    return _rounded(weight, dtype, split_axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _rounded(weight, dtype, axis):
    weight = weight.astype(dtype)
    if axis is not None:
        weight = jax.lax.all_gather(weight, axis, axis=1, tiled=True)
    return weight.astype(jnp.float32)


def _rounded_forward(weight, dtype, axis):
    return _rounded(weight, dtype, axis), None


def _rounded_backward(dtype, axis, _, cotangent):
    del dtype
    if axis is not None:
        cotangent = jax.lax.psum_scatter(cotangent, axis, scatter_dimension=1, tiled=True)
    return (cotangent,)


_rounded.defvjp(_rounded_forward, _rounded_backward)
