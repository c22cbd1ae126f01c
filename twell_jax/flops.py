"""Floating-point operations of a model, and the peak rates of known devices."""

from twell_jax.modules import TransformerConfig

# Dense bf16 tensor-core rates in FLOP/s, from the vendor's datasheets, by a part of the
# device's name; the first that fits.
_PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200": 989.5e12,
    "H100": 989.5e12,
    "A100": 312e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Peak dense bf16 rate of a device in FLOP/s, or None if it is not known here."""
    for name, rate in _PEAK_FLOPS.items():
        if name in device_kind:
            return rate
    return None


def train_flops_per_token(config: TransformerConfig, sequence_length: int) -> float:
    """FLOPs of forward and backward for one token, as if the layers were dense.

    Two a multiply-add and parameter forward, four backward. Causal attention counts half
    of the score matrix. Embedding look-ups, norms and recomputation count nothing.
    """
    heads = config.num_heads * config.resolved_head_dim
    kv_heads = config.resolved_num_kv_heads * config.resolved_head_dim
    attention = config.hidden_size * (2 * heads + 2 * kv_heads)
    ffn = config.hidden_size * config.intermediate_size * (3 if config.gated else 2)
    head = config.hidden_size * config.vocab_size
    scores_and_values = 2 * heads * sequence_length / 2
    return 6 * (config.num_layers * (attention + ffn + scores_and_values) + head)
