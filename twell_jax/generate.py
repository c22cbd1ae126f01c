"""Sampling text from a model."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx


def generate(
    model: nnx.Module, prompt: jax.Array, *, num_tokens: int, temperature: float, key: jax.Array
) -> jax.Array:
    """Continues prompts by `num_tokens` tokens.

    Runs the whole sequence through the model for every token, without a cache of keys and
    values: fine for samples, slow for serving.

    Args:
      model: a `Transformer`.
      prompt: int32 `[batch, length]`, length >= 1.
      num_tokens: tokens to add.
      temperature: divides the logits; 0 takes the likeliest token.
      key: a JAX random key.

    Returns:
      int32 `[batch, length + num_tokens]`, prompts included.
    """
    if prompt.ndim != 2 or prompt.shape[1] < 1:
        raise ValueError(f"prompt: shape must be [batch, length >= 1], got {prompt.shape}")
    graph, params = nnx.split(model)
    return _generate(graph, params, prompt, key, num_tokens, temperature)


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def _generate(graph, params, prompt, key, num_tokens, temperature):
    model = nnx.merge(graph, params)
    length = prompt.shape[1]
    tokens = jnp.pad(prompt, ((0, 0), (0, num_tokens)))

    def add_token(position, tokens):
        # Tokens from `position` on are padding, which causal attention does not see.
        features, _ = model.features(tokens)
        logits = model.logits(jax.lax.dynamic_index_in_dim(features, position - 1, 1, False))
        if temperature == 0:
            chosen = jnp.argmax(logits, axis=-1)
        else:
            step_key = jax.random.fold_in(key, position)
            chosen = jax.random.categorical(step_key, logits / temperature)
        return tokens.at[:, position].set(chosen.astype(tokens.dtype))

    return jax.lax.fori_loop(length, length + num_tokens, add_token, tokens)
