"""Sampling continues prompts, and follows the model."""

import jax
import numpy as np
import pytest
from flax import nnx

from twell_jax import Transformer, TransformerConfig
from twell_jax.generate import generate


@pytest.fixture(scope="module")
def model():
    config = TransformerConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=2,
        dtype="float32",
        ffn_backend="reference",
    )
    return Transformer(config, rngs=nnx.Rngs(0))


PROMPT = np.asarray([[3, 1, 4], [1, 5, 9]], np.int32)


def test_greedy_takes_the_likeliest_token(model):
    tokens = generate(model, PROMPT, num_tokens=5, temperature=0, key=jax.random.key(0))
    assert tokens.shape == (2, 8)
    np.testing.assert_array_equal(tokens[:, :3], PROMPT)
    for position in range(3, 8):
        logits, _ = model(tokens[:, :position])
        np.testing.assert_array_equal(tokens[:, position], logits[:, -1].argmax(axis=-1))


def test_sampling_depends_on_the_key_only(model):
    def sample(seed):
        key = jax.random.key(seed)
        return generate(model, PROMPT, num_tokens=20, temperature=1.0, key=key)

    np.testing.assert_array_equal(sample(1), sample(1))
    assert (sample(1) != sample(2)).any()


def test_no_tokens_and_no_prompt(model):
    key = jax.random.key(0)
    np.testing.assert_array_equal(
        generate(model, PROMPT, num_tokens=0, temperature=1.0, key=key), PROMPT
    )
    with pytest.raises(ValueError, match="prompt: shape must be"):
        generate(model, PROMPT[:, :0], num_tokens=1, temperature=1.0, key=key)
