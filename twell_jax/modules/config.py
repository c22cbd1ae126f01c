"""The shape of a transformer, as typed fields that `train.py` exposes as flags."""

import dataclasses

import jax

from pallas_kernels import BACKENDS
from twell_jax.errors import ConfigError

# Policies for recomputing a block's activations in the backward pass, by name.
REMAT_POLICIES = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "ffn": jax.checkpoint_policies.save_only_these_names("ffn_gate", "ffn_up", "ffn_lists"),
}

FFN_KINDS = ("sparse", "dense")
ACTIVATIONS = ("relu", "silu", "gelu")
DTYPES = ("float32", "bfloat16")
ATTENTION_IMPLEMENTATIONS = ("auto", "xla", "cudnn")


def check_choice(field: str, value, allowed) -> None:
    """Raises ConfigError naming the field and the allowed values."""
    if value not in allowed:
        raise ConfigError(f"{field}: must be one of {', '.join(map(str, allowed))}, got {value!r}")


def check_at_least(field: str, value, minimum) -> None:
    """Raises ConfigError naming the field and its minimum."""
    if not value >= minimum:
        raise ConfigError(f"{field}: must be at least {minimum}, got {value}")


def check_positive(field: str, value) -> None:
    """Raises ConfigError naming the field."""
    if not value > 0:
        raise ConfigError(f"{field}: must be greater than 0, got {value}")


# Not frozen, so that flags can override fields; hashed by value, as JAX needs it.
@dataclasses.dataclass(unsafe_hash=True)
class TransformerConfig:
    """A decoder-only transformer of the Llama family.

    Attributes:
      vocab_size: number of token ids.
      hidden_size: width D of the residual stream.
      intermediate_size: number H of hidden neurons of a feed-forward layer.
      num_layers: number of blocks.
      num_heads: query heads.
      num_kv_heads: key and value heads, a divisor of `num_heads`; 0 means `num_heads`.
      head_dim: width of a head, even; 0 means `hidden_size / num_heads`.
      ffn: "sparse" (ReLU gate, activation statistics) or "dense" (the usual layer).
      activation: of the dense layer, "relu", "silu" or "gelu" (its tanh form); the sparse
        one is always "relu".
      gated: whether the feed-forward layer has a gate.
      qkv_bias: biases on the query, key and value projections, as in Qwen2.
      tie_embeddings: the head uses the token embedding.
      rope_theta: base of the rotary frequencies.
      norm_eps: epsilon of RMSNorm.
      dtype: of the computation.
      param_dtype: of the parameters.
      remat: what a block keeps for its backward pass: "none" recomputes nothing,
        "full" keeps only the block's input, "dots" keeps matmul outputs, "ffn" keeps
        the feed-forward activations.
      attention: implementation of `jax.nn.dot_product_attention`; "auto" is cuDNN on a
        GPU where it supports the heads, else XLA.
      ffn_backend: backend of the sparse layer, see `pallas_kernels.BACKENDS`.
    """

    vocab_size: int = 32000
    hidden_size: int = 768
    intermediate_size: int = 2112
    num_layers: int = 6
    num_heads: int = 12
    num_kv_heads: int = 0
    head_dim: int = 0
    ffn: str = "sparse"
    activation: str = "relu"
    gated: bool = True
    qkv_bias: bool = False
    tie_embeddings: bool = True
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    dtype: str = "bfloat16"
    param_dtype: str = "float32"
    remat: str = "none"
    attention: str = "auto"
    ffn_backend: str = "auto"

    def validate(self, prefix: str = "") -> None:
        """Raises ConfigError naming the first field that is wrong, after `prefix`."""
        for field in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"):
            check_at_least(f"{prefix}{field}", getattr(self, field), 1)
        for field in ("num_kv_heads", "head_dim"):
            check_at_least(f"{prefix}{field}", getattr(self, field), 0)
        if self.num_heads % self.resolved_num_kv_heads:
            raise ConfigError(
                f"{prefix}num_kv_heads: must divide num_heads = {self.num_heads}, "
                f"got {self.num_kv_heads}"
            )
        if not self.head_dim and self.hidden_size % self.num_heads:
            raise ConfigError(
                f"{prefix}num_heads: must divide hidden_size = {self.hidden_size} where head_dim "
                f"is not set, got {self.num_heads}"
            )
        if self.resolved_head_dim % 2:
            raise ConfigError(
                f"{prefix}head_dim: rotary embeddings need an even size, "
                f"got {self.resolved_head_dim}"
            )
        check_positive(f"{prefix}rope_theta", self.rope_theta)
        check_positive(f"{prefix}norm_eps", self.norm_eps)
        check_choice(f"{prefix}ffn", self.ffn, FFN_KINDS)
        check_choice(f"{prefix}activation", self.activation, ACTIVATIONS)
        if self.ffn == "sparse" and self.activation != "relu":
            raise ConfigError(
                f"{prefix}activation: the sparse layer needs relu, got {self.activation!r}; "
                f"{prefix}ffn=dense takes any of {', '.join(ACTIVATIONS)}"
            )
        check_choice(f"{prefix}dtype", self.dtype, DTYPES)
        check_choice(f"{prefix}param_dtype", self.param_dtype, DTYPES)
        check_choice(f"{prefix}remat", self.remat, REMAT_POLICIES)
        check_choice(f"{prefix}ffn_backend", self.ffn_backend, BACKENDS)
        check_choice(f"{prefix}attention", self.attention, ATTENTION_IMPLEMENTATIONS)

    @property
    def resolved_num_kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def resolved_head_dim(self) -> int:
        """Width of a head."""
        return self.head_dim or self.hidden_size // self.num_heads
