"""Language models with sparse ReLU feed-forward layers: modules, training, data, analysis."""

from twell_jax.modules import (
    Attention,
    DenseFFN,
    RMSNorm,
    SparseFFN,
    Transformer,
    TransformerAux,
    TransformerConfig,
)

__all__ = [
    "Attention",
    "DenseFFN",
    "RMSNorm",
    "SparseFFN",
    "Transformer",
    "TransformerAux",
    "TransformerConfig",
]
