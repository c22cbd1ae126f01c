"""Every preset can be built, and has the size it says."""

import importlib
import pathlib

import jax
import pytest
from flax import nnx

from twell_jax import Transformer
from twell_jax.training.state import abstract_state, count_params

# By hand: layers * (4 D^2 + 3 D H + 2 D) + vocab * D + D, all heads tied.
NUM_PARAMS = {
    "tiny": 1_311_872,
    "small": 55_944_960,
    "paper_0p5b": 511_739_904,
    "paper_1b": 1_025_583_104,
    "paper_1p5b": 1_539_426_304,
    "paper_2b": 2_053_269_504,
}


def load(name):
    return importlib.import_module(f"configs.{name}").get_config()


@pytest.mark.parametrize("name", NUM_PARAMS)
def test_preset(name):
    config = load(name)
    config.validate()
    model = nnx.eval_shape(lambda: Transformer(config.model, rngs=nnx.Rngs(0)))
    shape = (2, config.data.sequence_length)
    tokens = jax.ShapeDtypeStruct(shape, "int32")
    logits, aux = nnx.eval_shape(lambda model, tokens: model(tokens), model, tokens)
    assert logits.shape == (*shape, config.model.vocab_size)
    assert aux.ffn_stats.fired.shape == (config.model.num_layers, config.model.intermediate_size)
    assert count_params(nnx.state(model, nnx.Param)) == NUM_PARAMS[name]
    assert count_params(abstract_state(config).params) == NUM_PARAMS[name]


def test_every_preset_is_listed():
    folder = pathlib.Path(importlib.import_module("configs.tiny").__file__).parent
    names = {path.stem for path in folder.glob("*.py")} - {"__init__", "paper"}
    assert names == set(NUM_PARAMS)
