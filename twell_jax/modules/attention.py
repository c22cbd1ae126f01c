"""Causal grouped-query self-attention."""

import jax
import jax.numpy as jnp
from flax import nnx

from twell_jax.modules.initializers import linear_init
from twell_jax.modules.rope import apply_rope


def select_implementation(name: str, head_dim: int, dtype) -> str:
    """Resolves "auto": cuDNN on a GPU where its flash attention serves the heads, else XLA."""
    if name != "auto":
        return name
    # cuDNN's flash attention: 16-bit dtypes, head widths in multiples of 8 up to 128.
    served = dtype == jnp.bfloat16 and head_dim % 8 == 0 and head_dim <= 128
    return "cudnn" if jax.default_backend() == "gpu" and served else "xla"


def segment_mask(segment_ids: jax.Array) -> jax.Array:
    """bool `[batch, 1, length, length]`: query and key are in the same segment."""
    return (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]


class Attention(nnx.Module):
    """Self-attention with rotary positions; queries see earlier keys of their own segment."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        qkv_bias: bool = False,
        rope_theta: float = 10000.0,
        implementation: str = "auto",
        dtype=jnp.bfloat16,
        param_dtype=jnp.float32,
        out_init=linear_init,
        rngs: nnx.Rngs,
    ):
        """Creates the four projections; `implementation` is "auto", "xla" or "cudnn"."""
        num_kv_heads = num_kv_heads or num_heads
        head_dim = head_dim or hidden_size // num_heads

        def linear(inputs, outputs, use_bias, kernel_init):
            return nnx.Linear(
                inputs,
                outputs,
                use_bias=use_bias,
                kernel_init=kernel_init,
                dtype=dtype,
                param_dtype=param_dtype,
                rngs=rngs,
            )

        self.query = linear(hidden_size, num_heads * head_dim, qkv_bias, linear_init)
        self.key = linear(hidden_size, num_kv_heads * head_dim, qkv_bias, linear_init)
        self.value = linear(hidden_size, num_kv_heads * head_dim, qkv_bias, linear_init)
        self.out = linear(num_heads * head_dim, hidden_size, False, out_init)
        self.head_dim = head_dim
        self.rope_theta = rope_theta
        self.implementation = implementation

    def __call__(
        self, x: jax.Array, positions: jax.Array, mask: jax.Array | None = None
    ) -> jax.Array:
        """Attends causally.

        Args:
          x: `[batch, length, hidden_size]`.
          positions: int32 `[batch, length]`.
          mask: bool, broadcastable to `[batch, num_heads, length, length]` (query, key);
            it is combined with the causal one. See `segment_mask`.

        Returns:
          `[batch, length, hidden_size]`.
        """

        def heads(projection):
            return projection.reshape(*x.shape[:-1], -1, self.head_dim)

        query = apply_rope(heads(self.query(x)), positions, self.rope_theta)
        key = apply_rope(heads(self.key(x)), positions, self.rope_theta)
        value = heads(self.value(x))
        attended = jax.nn.dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            is_causal=True,
            implementation=select_implementation(self.implementation, self.head_dim, query.dtype),
        )
        return self.out(attended.reshape(*x.shape[:-1], -1))
