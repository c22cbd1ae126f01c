"""Rotary position embedding, half-split form."""

import jax
import jax.numpy as jnp


def apply_rope(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotates pairs `(x[i], x[i + head_dim / 2])` by `position * theta^(-2i / head_dim)`.

    Angles and products are f32: in bf16 a position past 256 would not be exact.
    Source: "RoFormer", arXiv 2104.09864, with the half-split pairing of Llama.

    Args:
      x: `[batch, length, heads, head_dim]`, head_dim even.
      positions: int32 `[batch, length]`.
      theta: base of the frequencies.

    Returns:
      An array like x.
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None, None].astype(jnp.float32) * frequency
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def positions_in_segments(segment_ids: jax.Array) -> jax.Array:
    """int32 `[batch, length]` positions that restart at 0 where the segment id changes."""
    length = segment_ids.shape[-1]
    index = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), segment_ids.shape)
    starts = jnp.concatenate(
        [jnp.ones_like(segment_ids[..., :1], bool), segment_ids[..., 1:] != segment_ids[..., :-1]],
        axis=-1,
    )
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=segment_ids.ndim - 1)
