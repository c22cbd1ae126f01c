"""The sparse feed-forward layer over a mesh: each device sees its tokens and its neurons."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pallas_kernels import FfnPlan, FfnStats, sparse_ffn
from pallas_kernels.ops import check_sparse_ffn
from twell_jax.sharding import TENSOR, TOKEN_AXES, active_axes, axis_size, dividing_axes
from twell_jax.sharding.gathers import local_weight, split_columns


def sharded_sparse_ffn(
    x,
    w_gate,
    w_up,
    w_down,
    token_mask,
    *,
    backend: str,
    plan: FfnPlan = FfnPlan(),  # noqa: B008
) -> tuple[jax.Array, FfnStats]:
    """`pallas_kernels.sparse_ffn` under `jax.shard_map`, if a mesh is in use.

    Weights may be wider than x, as parameters are: they are rounded to its dtype.

    Tokens are split along the first axis of x over the token axes of the mesh, neurons
    over its tensor axis; weights are gathered over fsdp, `y` is summed over tensor.
    Statistics are those of all devices, weighted by tokens. A backend sees local shapes
    only. Without a mesh (`jax.set_mesh`) this is the plain call, as it is inside a
    `jax.shard_map` of the caller's own.

    `plan` is that of one tensor shard: bands are formed inside each.

    Weights travel in the dtype of x. Sums over devices, of y and of all gradients, are made in
    f32 and rounded once.

    Raises:
      ValueError: an argument has a wrong shape or dtype, the neurons do not divide over the
        mesh, or the plan does not fit them.
    """
    weights = (w_gate, w_up, w_down)
    rounded = (w if w is None else jax.ShapeDtypeStruct(w.shape, x.dtype) for w in weights)
    check_sparse_ffn(x, *rounded, token_mask)
    # A single token, or a batch that does not divide, is computed on every device.
    token_axes = dividing_axes(TOKEN_AXES, x.shape[0]) if x.ndim > 1 else ()
    neuron_axes = active_axes((TENSOR,))
    options = {"backend": backend, "plan": plan}
    if not token_axes and not neuron_axes:
        weights = (w if w is None else w.astype(x.dtype) for w in weights)
        return sparse_ffn(x, *weights, token_mask=token_mask, **options)
    if w_up.shape[0] % axis_size(neuron_axes):
        raise ValueError(
            f"w_up: {w_up.shape[0]} neurons do not divide over the {axis_size(neuron_axes)} "
            f"devices of mesh axis {TENSOR!r}"
        )
    if token_mask is None:
        token_mask = jnp.ones(x.shape[:-1], bool)
    split_axis = split_columns(w_up, token_axes)
    tokens, neurons = P(token_axes or None), P(neuron_axes or None)
    of_weights = P(neuron_axes or None, split_axis)
    dtype = x.dtype
    if neuron_axes:
        # f32 on the way in, and narrow again on each device: no work forward, and backward it
        # makes the sum of dx over devices an f32 one.
        x = x.astype(jnp.float32)
    return jax.shard_map(
        functools.partial(
            _local_ffn,
            dtype=dtype,
            token_axes=token_axes,
            neuron_axes=neuron_axes,
            split_axis=split_axis,
            options=options,
        ),
        in_specs=(tokens, of_weights, of_weights, of_weights, tokens),
        out_specs=(tokens, FfnStats(l1=P(), l0=P(), fired=neurons, num_tokens=P(), num_dense=P())),
    )(x, *weights, token_mask)


def _local_ffn(
    x, w_gate, w_up, w_down, token_mask, *, dtype, token_axes, neuron_axes, split_axis, options
):
    # What one device computes depends on its tokens and its neurons. Saying so makes the
    # transpose sum weight gradients over token axes, and dx over neuron axes.
    def varying(array, axes):
        return jax.lax.pcast(array, axes, to="varying") if axes else array

    # Counted before the mask is marked as varying: all neuron shards count the same tokens.
    num_tokens = jax.lax.psum(jnp.sum(token_mask, dtype=jnp.int32), token_axes)
    factor = 1.0 / jnp.maximum(num_tokens, 1).astype(jnp.float32)

    weights = (
        None if w is None else local_weight(w, dtype, split_axis, token_axes).astype(dtype)
        for w in (w_gate, w_up, w_down)
    )
    x, token_mask = varying(x, neuron_axes).astype(dtype), varying(token_mask, neuron_axes)
    y, stats = sparse_ffn(x, *weights, token_mask=token_mask, **options)

    def global_mean(mean):
        local_sum = mean * stats.num_tokens.astype(jnp.float32)
        return jax.lax.psum(local_sum, token_axes + neuron_axes) * factor

    global_stats = FfnStats(
        l1=global_mean(stats.l1),
        l0=global_mean(stats.l0),
        fired=jax.lax.psum(stats.fired, token_axes),
        num_tokens=num_tokens,
        # A token counts once for every device that has a part of its neurons.
        num_dense=jax.lax.psum(stats.num_dense, token_axes + neuron_axes),
    )
    if neuron_axes:
        y = jax.lax.psum(y.astype(jnp.float32), neuron_axes).astype(dtype)
    return y, global_stats
