"""Cross-entropy, in f32."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class TokenLosses(NamedTuple):
    """Sums over the targets of a batch, f32 scalars.

    Attributes:
      cross_entropy: sum of `-log p(target)`, in nats.
      squared_log_z: sum of the squared log-normaliser, for the z-loss.
    """

    cross_entropy: jax.Array
    squared_log_z: jax.Array


def token_losses(logits: jax.Array, targets: jax.Array, loss_mask: jax.Array) -> TokenLosses:
    """Sums of the losses over the positions where `loss_mask` is True.

    Args:
      logits: `[batch, length, vocab_size]`.
      targets: int32 `[batch, length]`.
      loss_mask: bool `[batch, length]`.
    """
    logits = logits.astype(jnp.float32)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return TokenLosses(
        cross_entropy=jnp.sum(jnp.where(loss_mask, log_z - target_logits, 0)),
        squared_log_z=jnp.sum(jnp.where(loss_mask, jnp.square(log_z), 0)),
    )
