"""Root-mean-square normalisation."""

import jax
import jax.numpy as jnp
from flax import nnx


class RMSNorm(nnx.Module):
    """`x / rms(x) * scale`, computed in f32 and returned in `dtype`.

    Source: "Root Mean Square Layer Normalization", arXiv 1910.07467.
    """

    def __init__(
        self, size: int, *, eps: float = 1e-6, dtype=jnp.bfloat16, param_dtype=jnp.float32
    ):
        """`size`: length of the last axis of the inputs."""
        self.scale = nnx.Param(jnp.ones((size,), param_dtype))
        self.eps = eps
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., size] -> [..., size]` in `dtype`."""
        x = x.astype(jnp.float32)
        inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
        return (x * inverse_rms * self.scale[...].astype(jnp.float32)).astype(self.dtype)
