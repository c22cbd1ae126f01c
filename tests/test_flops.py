"""FLOP counts against XLA's own count of a dense forward pass."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from twell_jax import Transformer, TransformerConfig
from twell_jax.flops import peak_flops, train_flops_per_token


def test_count_equals_xla():
    config = TransformerConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=1024,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        dtype="float32",
        ffn="dense",
        activation="relu",
    )
    length = 1024
    model = Transformer(config, rngs=nnx.Rngs(0))
    tokens = jnp.zeros((2, length), jnp.int32)
    graph, params = nnx.split(model)
    compiled = jax.jit(lambda p, t: nnx.merge(graph, p)(t)[0]).lower(params, tokens).compile()
    forward = compiled.cost_analysis()["flops"] / tokens.size
    # XLA computes all of the causal scores, of which half count here, and the softmax of each.
    heads = config.num_heads * config.resolved_head_dim
    half_of_scores = config.num_layers * 2 * heads * length
    counted = train_flops_per_token(config, length) / 3
    assert half_of_scores > 0.15 * counted
    assert counted + half_of_scores == pytest.approx(forward, rel=0.03)


def test_peak_rates():
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989.5e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("cpu") is None
