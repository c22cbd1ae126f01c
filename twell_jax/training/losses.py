"""Cross-entropy of a linear head, without ever holding the logits of a whole batch."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from twell_jax.sharding import TOKEN_AXES, dividing_axes
from twell_jax.sharding.gathers import local_weight, split_columns


class TokenLosses(NamedTuple):
    """Sums over the targets of a batch, f32 scalars.

    Attributes:
      total: cross-entropy and z-loss together; this one has a gradient.
      cross_entropy: sum of `-log p(target)`, in nats; has no gradient.
    """

    total: jax.Array
    cross_entropy: jax.Array


def linear_cross_entropy(
    features: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    loss_mask: jax.Array,
    *,
    z_loss: float = 0.0,
    chunk_tokens: int = 0,
) -> TokenLosses:
    """Losses of the logits `features head'`, summed where `loss_mask` is True.

    The logits are f32 sums of products in the dtype of `features`; their gradient is
    rounded to that dtype once, where the two matmuls of the backward pass read it. They
    are computed in chunks along the length, and a chunk's gradient together with its
    loss, so that nothing is computed twice. Over a mesh every device takes its own tokens,
    and the gradient of the head is summed over devices once, not chunk by chunk.

    Args:
      features: `[batch, length, hidden_size]`.
      head: `[vocab_size, hidden_size]`, rounded to the dtype of `features`.
      targets: int32 `[batch, length]`.
      loss_mask: bool `[batch, length]`.
      z_loss: weight of the squared log-normaliser in the total.
      chunk_tokens: about how many tokens of a device a chunk may hold; 0 makes one chunk.
    """
    axes = dividing_axes(TOKEN_AXES, features.shape[0])
    split_axis = split_columns(head, axes)

    def local_losses(features, head, targets, loss_mask):
        head = local_weight(head, features.dtype, split_axis, axes).astype(features.dtype)
        sums = _summed_losses(features, head, targets, loss_mask, z_loss, chunk_tokens, axes)
        return jax.lax.psum(sums, axes) if axes else sums

    if axes:
        # The vocabulary may be split over another axis; that is left to the partitioner.
        tokens = P(axes)
        local_losses = jax.shard_map(
            local_losses,
            in_specs=(tokens, P(None, split_axis), tokens, tokens),
            out_specs=P(),
            axis_names=set(axes),
        )
    total, cross_entropy = local_losses(features, head, targets, loss_mask)
    return TokenLosses(total, jax.lax.stop_gradient(cross_entropy))


def _varying(array, axes):
    """Marks `array` as different on the devices along the manual `axes`."""
    return jax.lax.pcast(array, axes, to="varying") if axes else array


def _chunks(array, chunk_tokens):
    """`[batch, length, ...]` to `[chunks, batch, chunk_length, ...]`, filled up with zeros.

    The batch axis stays whole, as it may be sharded over devices.
    """
    batch, length = array.shape[:2]
    wanted = -(-batch * length // chunk_tokens) if chunk_tokens else 1
    chunk_length = -(-length // wanted)
    number = -(-length // chunk_length)
    padding = [(0, 0)] * array.ndim
    padding[1] = (0, number * chunk_length - length)
    split = jnp.pad(array, padding).reshape(batch, number, chunk_length, *array.shape[2:])
    return jnp.moveaxis(split, 1, 0)


def _chunk_losses(features, head, targets, loss_mask, z_loss):
    """(total, cross-entropy, logits, log-normaliser, is-target) of a chunk."""
    logits = jnp.einsum("bld,vd->blv", features, head, preferred_element_type=jnp.float32)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    # A masked sum, not a gather: it needs only its own part of a vocabulary that is split.
    is_target = jnp.arange(head.shape[0]) == targets[..., None]
    target_logits = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
    cross_entropy = jnp.sum(jnp.where(loss_mask, log_z - target_logits, 0))
    total = cross_entropy + z_loss * jnp.sum(jnp.where(loss_mask, jnp.square(log_z), 0))
    return total, cross_entropy, logits, log_z, is_target


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _summed_losses(features, head, targets, loss_mask, z_loss, chunk_tokens, axes):
    def add(sums, chunk):
        total, cross_entropy, *_ = _chunk_losses(chunk[0], head, *chunk[1:], z_loss)
        return (sums[0] + total, sums[1] + cross_entropy), None

    arrays = (features, targets, loss_mask)
    chunks = jax.tree.map(lambda array: _chunks(array, chunk_tokens), arrays)
    zero = _varying(jnp.float32(0), axes)
    return jax.lax.scan(add, (zero, zero), chunks)[0]


def _summed_losses_forward(features, head, targets, loss_mask, z_loss, chunk_tokens, axes):
    def add(carry, chunk):
        sums, d_head = carry
        x, chunk_targets, mask = chunk
        total, cross_entropy, logits, log_z, is_target = _chunk_losses(
            x, head, chunk_targets, mask, z_loss
        )
        # d total / d logits, where mask: softmax (1 + 2 z log_z) - onehot(target)
        probabilities = jnp.exp(logits - log_z[..., None])
        d_logits = probabilities * (1 + 2 * z_loss * log_z)[..., None] - is_target
        d_logits = jnp.where(mask[..., None], d_logits, 0).astype(x.dtype)
        d_x = jnp.einsum("blv,vd->bld", d_logits, head, preferred_element_type=jnp.float32)
        d_head = d_head + jnp.einsum("blv,bld->vd", d_logits, x, preferred_element_type=jnp.float32)
        return ((sums[0] + total, sums[1] + cross_entropy), d_head), d_x.astype(x.dtype)

    arrays = (features, targets, loss_mask)
    chunks = jax.tree.map(lambda array: _chunks(array, chunk_tokens), arrays)
    zero = _varying(jnp.float32(0), axes)
    zeros = _varying(jnp.zeros(head.shape, jnp.float32), axes)
    (sums, d_head), d_features = jax.lax.scan(add, ((zero, zero), zeros), chunks)
    batch, length, width = features.shape
    d_features = jnp.moveaxis(d_features, 0, 1).reshape(batch, -1, width)[:, :length]
    # An empty array carries the head's dtype to the backward pass.
    return sums, (d_features, d_head, jnp.zeros((0,), head.dtype))


def _summed_losses_backward(z_loss, chunk_tokens, axes, residuals, cotangents):
    del z_loss, chunk_tokens, axes
    d_features, d_head, like_head = residuals
    total_bar = cotangents[0]
    d_features = (total_bar * d_features.astype(jnp.float32)).astype(d_features.dtype)
    return d_features, (total_bar * d_head).astype(like_head.dtype), None, None


_summed_losses.defvjp(_summed_losses_forward, _summed_losses_backward)
