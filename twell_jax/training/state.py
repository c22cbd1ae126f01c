"""What a run carries from step to step, all of it in the checkpoint."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from twell_jax.modules import Transformer, TransformerConfig
from twell_jax.training.config import Config
from twell_jax.training.l1_penalty import L1State, initial_l1_state
from twell_jax.training.optimizer import make_optimizer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """State of training, a pytree of arrays.

    Attributes:
      step: int32 scalar, number of steps taken.
      params: parameters as nested dicts.
      opt_state: state of the optimizer.
      l1: state of the L1 penalty.
      steps_since_fired: int32 `[num_layers, H]`, steps since each neuron was last active;
        None with dense layers.
      num_skipped: int32 scalar, steps whose update was discarded.
    """

    step: jax.Array
    params: dict
    opt_state: tuple
    l1: L1State
    steps_since_fired: jax.Array | None
    num_skipped: jax.Array


def model_graph(config: TransformerConfig) -> nnx.GraphDef:
    """The structure of a model, to be merged with parameters; allocates nothing."""
    return nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))[0]


def initial_params(config: TransformerConfig, seed: int) -> dict:
    """Fresh parameters as nested dicts."""
    return nnx.to_pure_dict(nnx.split(Transformer(config, rngs=nnx.Rngs(seed)))[1])


def initial_state(config: Config) -> TrainState:
    """State before the first step; may be traced."""
    params = initial_params(config.model, config.train.seed)
    steps_since_fired = None
    if config.model.ffn == "sparse":
        shape = (config.model.num_layers, config.model.intermediate_size)
        steps_since_fired = jnp.zeros(shape, jnp.int32)
    return TrainState(
        step=jnp.int32(0),
        params=params,
        opt_state=make_optimizer(config.optimizer).init(params),
        l1=initial_l1_state(config.l1),
        steps_since_fired=steps_since_fired,
        num_skipped=jnp.int32(0),
    )


def abstract_state(config: Config) -> TrainState:
    """Shapes and dtypes of the state."""
    return jax.eval_shape(lambda: initial_state(config))


def count_params(params) -> int:
    """Number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
