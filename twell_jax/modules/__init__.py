"""Flax NNX modules, each usable alone."""

from twell_jax.modules.attention import Attention, segment_mask
from twell_jax.modules.config import TransformerConfig
from twell_jax.modules.ffn import DenseFFN, SparseFFN
from twell_jax.modules.norm import RMSNorm
from twell_jax.modules.rope import apply_rope, positions_in_segments
from twell_jax.modules.transformer import Block, Transformer, TransformerAux

__all__ = [
    "Attention",
    "Block",
    "DenseFFN",
    "RMSNorm",
    "SparseFFN",
    "Transformer",
    "TransformerAux",
    "TransformerConfig",
    "apply_rope",
    "positions_in_segments",
    "segment_mask",
]
