"""What a run carries from step to step, all of it in the checkpoint."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels import FfnPlan
from twell_jax.modules import Transformer, TransformerConfig
from twell_jax.sharding import make_mesh, shardings
from twell_jax.training.config import Config
from twell_jax.training.l1_penalty import L1State, initial_l1_state
from twell_jax.training.optimizer import make_optimizer


class Activity(NamedTuple):
    """Which neurons fired lately: running sums that recent steps dominate.

    Divided by `weight` they are means.

    Attributes:
      firing_rates: f32 `[num_layers, H]`, share of tokens on which each neuron was active.
      dense_share: f32 `[num_layers]`, share of tokens that a backend computed densely because
        they did not fit its format.
      weight: f32 scalar.
    """

    firing_rates: jax.Array
    dense_share: jax.Array
    weight: jax.Array


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
      activity: None with dense layers.
      num_skipped: int32 scalar, steps whose update was discarded.
    """

    step: jax.Array
    params: dict
    opt_state: tuple
    l1: L1State
    steps_since_fired: jax.Array | None
    activity: Activity | None
    num_skipped: jax.Array


def model_graph(config: TransformerConfig, plans: Sequence[FfnPlan] | None = None) -> nnx.GraphDef:
    """The structure of a model, to be merged with parameters; allocates nothing.

    `plans` are those of its layers, see `Transformer.set_ffn_plans`.
    """

    def build():
        model = Transformer(config, rngs=nnx.Rngs(0))
        if plans is not None:
            model.set_ffn_plans(plans)
        return model

    return nnx.split(nnx.eval_shape(build))[0]


def initial_params(config: TransformerConfig, seed: int) -> dict:
    """Fresh parameters as nested dicts."""
    return nnx.to_pure_dict(nnx.split(Transformer(config, rngs=nnx.Rngs(seed)))[1])


def initial_state(config: Config, layout: TrainState | None = None) -> TrainState:
    """State before the first step.

    The parameters are drawn on one device and then spread out: XLA rounds a draw
    differently, by a few last places, in a program that is split over a mesh.

    Args:
      config: of the run.
      layout: shardings of the state; the first device holds all of it by default.
    """
    one_device = make_mesh((1, 1, 1), devices=jax.local_devices()[:1])
    with jax.set_mesh(one_device):
        params = jax.jit(lambda: initial_params(config.model, config.train.seed))()
    if layout is None:
        layout = shardings(one_device, abstract_state(config))
    params = jax.tree.map(
        lambda leaf, sharding: jax.make_array_from_callback(
            leaf.shape, sharding, np.asarray(leaf).__getitem__
        ),
        params,
        layout.params,
    )
    return jax.jit(lambda params: _fresh_state(config, params), out_shardings=layout)(params)


def _fresh_state(config: Config, params: dict) -> TrainState:
    steps_since_fired = activity = None
    if config.model.ffn == "sparse":
        shape = (config.model.num_layers, config.model.intermediate_size)
        steps_since_fired = jnp.zeros(shape, jnp.int32)
        activity = Activity(jnp.zeros(shape), jnp.zeros(shape[:1]), jnp.float32(0))
    return TrainState(
        step=jnp.int32(0),
        params=params,
        opt_state=make_optimizer(config.optimizer).init(params),
        l1=initial_l1_state(config.l1),
        steps_since_fired=steps_since_fired,
        activity=activity,
        num_skipped=jnp.int32(0),
    )


def abstract_state(config: Config) -> TrainState:
    """Shapes and dtypes of the state."""
    return jax.eval_shape(
        lambda: _fresh_state(config, initial_params(config.model, config.train.seed))
    )


def count_params(params) -> int:
    """Number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
