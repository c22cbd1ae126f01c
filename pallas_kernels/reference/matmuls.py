"""The three products of a neuron-major layer, accumulated in f32."""

import jax.numpy as jnp


def to_hidden(x, w):
    """`[..., D] x [H, D] -> [..., H]` in f32."""
    return jnp.einsum("...d,hd->...h", x, w, preferred_element_type=jnp.float32)


def from_hidden(h, w):
    """`[..., H] x [H, D] -> [..., D]` in f32."""
    return jnp.einsum("...h,hd->...d", h, w, preferred_element_type=jnp.float32)


def over_tokens(h, x):
    """`[..., H] x [..., D] -> [H, D]` in f32: a weight gradient."""
    h, x = h.reshape(-1, h.shape[-1]), x.reshape(-1, x.shape[-1])
    return jnp.einsum("th,td->hd", h, x, preferred_element_type=jnp.float32)
