"""The sample of text that ends a run."""

import pathlib

import jax
import numpy as np
from flax import nnx

from twell_jax.console import console
from twell_jax.data import store
from twell_jax.data.tokenizer import load_tokenizer
from twell_jax.generate import generate
from twell_jax.training.config import Config
from twell_jax.training.state import model_graph

# Length of the prompt that is taken from the held-out text if none is given.
_PROMPT_TOKENS = 16


def print_sample(config: Config, data_path: str, params: dict) -> None:
    """Prints `log.sample_tokens` tokens that the model writes after `log.sample_prompt`."""
    if not config.log.sample_tokens:
        return
    tokenizer = load_tokenizer(pathlib.Path(data_path) / store.TOKENIZER)
    prompt = tokenizer.encode(config.log.sample_prompt, add_special_tokens=False).ids
    if not prompt:
        stream = store.TokenStream(data_path, "validation")
        prompt = stream.read(0, min(_PROMPT_TOKENS, stream.num_tokens))[0]
    tokens = generate(
        nnx.merge(model_graph(config.model), params),
        np.asarray([prompt], np.int32),
        num_tokens=config.log.sample_tokens,
        temperature=config.log.sample_temperature,
        key=jax.random.key(config.train.seed),
    )
    # A vocabulary that is padded to a rounder size has ids without a token.
    known = [t for t in np.asarray(tokens[0]).tolist() if t < tokenizer.get_vocab_size()]
    console.rule("sample")
    console.print(tokenizer.decode(known, skip_special_tokens=False), markup=False)
    console.rule()
