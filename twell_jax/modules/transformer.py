"""A decoder-only transformer of the Llama family with sparse feed-forward layers."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import FfnPlan, FfnStats
from twell_jax.modules.attention import Attention, segment_mask
from twell_jax.modules.config import REMAT_POLICIES, TransformerConfig
from twell_jax.modules.embed import embed
from twell_jax.modules.ffn import DenseFFN, SparseFFN
from twell_jax.modules.initializers import residual_init, row_init
from twell_jax.modules.norm import RMSNorm
from twell_jax.modules.rope import positions_in_segments
from twell_jax.sharding import constrain_tokens


class TransformerAux(NamedTuple):
    """What a forward pass returns beside the logits.

    Attributes:
      ffn_stats: `FfnStats` with a leading layer axis on every field, or None for dense
        layers.
    """

    ffn_stats: FfnStats | None


class Block(nnx.Module):
    """Attention and a feed-forward layer, each behind a norm and added to its input."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        dtypes = {"dtype": jnp.dtype(config.dtype), "param_dtype": jnp.dtype(config.param_dtype)}
        out_init = residual_init(config.num_layers)
        self.attention_norm = RMSNorm(config.hidden_size, eps=config.norm_eps, **dtypes)
        self.attention = Attention(
            config.hidden_size,
            config.num_heads,
            num_kv_heads=config.resolved_num_kv_heads,
            head_dim=config.resolved_head_dim,
            qkv_bias=config.qkv_bias,
            rope_theta=config.rope_theta,
            implementation=config.attention,
            out_init=out_init,
            rngs=rngs,
            **dtypes,
        )
        self.ffn_norm = RMSNorm(config.hidden_size, eps=config.norm_eps, **dtypes)
        sizes = (config.hidden_size, config.intermediate_size)
        options = {"gated": config.gated, "down_init": out_init, "rngs": rngs, **dtypes}
        if config.ffn == "sparse":
            self.ffn = SparseFFN(*sizes, backend=config.ffn_backend, **options)
        else:
            self.ffn = DenseFFN(*sizes, activation=config.activation, **options)

    def __call__(self, x, positions, mask, token_mask) -> tuple[jax.Array, FfnStats | None]:
        """`[batch, length, hidden_size]` to the same, and the statistics of its layer."""
        x = constrain_tokens(x + self.attention(self.attention_norm(x), positions, mask))
        y, stats = self.ffn(self.ffn_norm(x), token_mask)
        return constrain_tokens(x + y), stats


class Transformer(nnx.Module):
    """Token ids to logits."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        """Raises ConfigError naming the field if `config` is not valid."""
        config.validate()
        self.config = dataclasses.replace(config)
        dtypes = {"dtype": jnp.dtype(config.dtype), "param_dtype": jnp.dtype(config.param_dtype)}
        self.embedding = nnx.Embed(
            config.vocab_size,
            config.hidden_size,
            embedding_init=row_init,
            rngs=rngs,
            **dtypes,
        )
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        self.final_norm = RMSNorm(config.hidden_size, eps=config.norm_eps, **dtypes)
        # [vocab, D] like the embedding, so that a tied and a separate head read alike.
        shape = (config.vocab_size, config.hidden_size)
        self.head = (
            None
            if config.tie_embeddings
            else nnx.Param(row_init(rngs.params(), shape, dtypes["param_dtype"]))
        )

    def set_ffn_plans(self, plans: Sequence[FfnPlan]) -> None:
        """Gives every layer its plan, see `SparseFFN`; a model's plans are no parameters.

        Raises:
          ValueError: there are not as many plans as layers, or the layers are dense.
        """
        if self.config.ffn != "sparse":
            raise ValueError(f"plans: layers are {self.config.ffn}, only sparse ones have a plan")
        if len(plans) != len(self.blocks):
            raise ValueError(f"plans: {len(plans)} for {len(self.blocks)} layers")
        for block, plan in zip(self.blocks, plans, strict=True):
            block.ffn.plan = plan

    def __call__(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> tuple[jax.Array, TransformerAux]:
        """Logits of the next token at every position.

        Args:
          tokens: int32 `[batch, length]`, in `[0, vocab_size)`.
          segment_ids: int32 `[batch, length]`: tokens see only tokens of their own segment;
            0 marks padding, which counts in no statistic. None: one segment, no padding.
          positions: int32 `[batch, length]`; by default they restart with every segment.

        Returns:
          f32 logits `[batch, length, vocab_size]`, and `TransformerAux`.
        """
        x, aux = self.features(tokens, segment_ids, positions)
        return self.logits(x), aux

    def features(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> tuple[jax.Array, TransformerAux]:
        """Like a call, but returns the normed features `[batch, length, hidden_size]`."""
        _check_inputs(tokens, segment_ids=segment_ids, positions=positions)
        mask = token_mask = None
        if segment_ids is not None:
            mask = segment_mask(segment_ids)
            token_mask = segment_ids != 0
        if positions is None:
            one_segment = jnp.zeros_like(tokens)
            positions = positions_in_segments(one_segment if segment_ids is None else segment_ids)

        apply = _apply_block
        if self.config.remat != "none":
            apply = nnx.remat(_apply_block, policy=REMAT_POLICIES[self.config.remat])
        x = embed(self.embedding.embedding[...], tokens, jnp.dtype(self.config.dtype))
        x = constrain_tokens(x)
        stats = []
        for block in self.blocks:
            x, block_stats = apply(block, x, positions, mask, token_mask)
            stats.append(block_stats)
        stacked = None
        if stats[0] is not None:
            stacked = jax.tree.map(lambda *layers: jnp.stack(layers), *stats)
        return self.final_norm(x), TransformerAux(ffn_stats=stacked)

    def logits(self, x: jax.Array) -> jax.Array:
        """f32 logits of features `[..., hidden_size]`."""
        return jnp.einsum(
            "...d,vd->...v",
            x,
            self.head_weights().astype(x.dtype),
            preferred_element_type=jnp.float32,
        )

    def head_weights(self) -> jax.Array:
        """`[vocab_size, hidden_size]`, as stored: `logits = features head'`, in `config.dtype`."""
        head = self.embedding.embedding if self.head is None else self.head
        return head[...]


def _apply_block(block, x, positions, mask, token_mask):
    return block(x, positions, mask, token_mask)


def _check_inputs(tokens, **others) -> None:
    if tokens.ndim != 2:
        raise ValueError(f"tokens: shape must be [batch, length], got {tokens.shape}")
    for name, array in others.items():
        if array is not None and array.shape != tokens.shape:
            raise ValueError(
                f"{name}: shape must be that of tokens, {tokens.shape}, got {array.shape}"
            )
