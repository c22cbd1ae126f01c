"""Causal grouped-query self-attention."""

import logging

import jax
import jax.numpy as jnp
from flax import nnx

from twell_jax.errors import ConfigError
from twell_jax.modules.config import ATTENTION_IMPLEMENTATIONS, check_choice
from twell_jax.modules.initializers import linear_init
from twell_jax.modules.linear import make_linear
from twell_jax.modules.rope import apply_rope

_logger = logging.getLogger(__name__)
_logged: set[str] = set()


def select_implementation(name: str, *, head_dim: int, dtype, length: int, masked: bool) -> str:
    """Resolves "auto": cuDNN on a GPU where its flash attention serves the call, else XLA.

    Says once why a GPU does not get cuDNN.
    """
    if name != "auto":
        return name
    if jax.default_backend() != "gpu":
        return "xla"
    largest = 256 if _compute_capability() >= 9.0 else 128
    if dtype not in (jnp.bfloat16, jnp.float16):
        reason = f"dtype {jnp.dtype(dtype)}"
    elif head_dim % 8 or head_dim > largest:
        reason = f"head_dim {head_dim}, only multiples of 8 up to {largest}"
    elif masked and length % 2:
        reason = f"an odd length, {length}, with a mask"
    else:
        return "cudnn"
    if reason not in _logged:
        _logged.add(reason)
        _logger.warning("attention runs on XLA: cuDNN does not serve %s", reason)
    return "xla"


def _compute_capability() -> float:
    return float(jax.devices()[0].compute_capability)


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
        """Creates the four projections.

        Args:
          hidden_size: width of the inputs and outputs.
          num_heads: query heads.
          num_kv_heads: key and value heads, a divisor of `num_heads`; by default as many.
          head_dim: width of a head, even; by default `hidden_size / num_heads`.
          qkv_bias: biases on the query, key and value projections.
          rope_theta: base of the rotary frequencies.
          implementation: "xla", "cudnn", or "auto", which takes cuDNN on a GPU where it can.
          dtype: of the computation.
          param_dtype: of the parameters.
          out_init: initialiser of the output projection.
          rngs: of the initial parameters.

        Raises:
          ConfigError: heads do not divide, or `implementation` is not known.
        """
        check_choice("implementation", implementation, ATTENTION_IMPLEMENTATIONS)
        num_kv_heads = num_kv_heads or num_heads
        if num_heads % num_kv_heads:
            raise ConfigError(
                f"num_kv_heads: must divide num_heads = {num_heads}, got {num_kv_heads}"
            )
        if not head_dim and hidden_size % num_heads:
            raise ConfigError(
                f"num_heads: must divide hidden_size = {hidden_size} where head_dim is not set, "
                f"got {num_heads}"
            )
        head_dim = head_dim or hidden_size // num_heads
        if head_dim % 2:
            raise ConfigError(f"head_dim: rotary embeddings need an even size, got {head_dim}")

        def linear(inputs, outputs, use_bias, kernel_init):
            return make_linear(
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
            implementation=select_implementation(
                self.implementation,
                head_dim=self.head_dim,
                dtype=query.dtype,
                length=x.shape[1],
                masked=mask is not None,
            ),
        )
        return self.out(attended.reshape(*x.shape[:-1], -1))
