"""Gives dead neurons a new start, without a jump in what the model computes.

A neuron that never fires gets no gradient, so it stays dead. Reviving one draws a new
gate row (the up row of the layer without a gate) and sets its down row to zero: it may
fire from then on, adds nothing at first, and learns what to add. The optimizer's moments
of its rows start from zero, as they belong to weights that are gone.
"""

import jax
import jax.numpy as jnp

from twell_jax.modules.initializers import row_init
from twell_jax.training.config import Config
from twell_jax.training.reorder import FFN_ROWS
from twell_jax.training.state import TrainState


def revive_dead_neurons(config: Config, state: TrainState) -> tuple[TrainState, jax.Array]:
    """Revives every neuron that has not fired for `train.dead_after_steps` steps.

    Args:
      config: of the run.
      state: after a step; the draws depend on its step number and the run's seed alone.

    Returns:
      The new state, and the number of revived neurons, int32 `[num_layers]`.
    """
    dead = state.steps_since_fired >= config.train.dead_after_steps
    key = jax.random.fold_in(jax.random.key(config.train.seed), state.step)
    blocks = dict(state.params["blocks"])
    for layer, block in blocks.items():
        ffn = block["ffn"]
        drawn = "w_gate" if config.model.gated else "w_up"
        weights = ffn[drawn]
        fresh = row_init(jax.random.fold_in(key, layer), weights.shape, weights.dtype)
        rows = dead[layer][:, None]
        new_ffn = {
            **ffn,
            drawn: jnp.where(rows, fresh, weights),
            "w_down": jnp.where(rows, 0, ffn["w_down"]),
        }
        blocks[layer] = {**block, "ffn": new_ffn}

    def forget(path, leaf):
        names = [getattr(key, "key", None) for key in path]
        if names[-1] not in FFN_ROWS:
            return leaf
        layer = names[names.index("blocks") + 1]
        return jnp.where(dead[layer][:, None], 0, leaf)

    new_state = TrainState(
        **{
            **vars(state),
            "params": {**state.params, "blocks": blocks},
            "opt_state": jax.tree.map_with_path(forget, state.opt_state),
            "steps_since_fired": jnp.where(dead, 0, state.steps_since_fired),
        }
    )
    return new_state, jnp.sum(dead, axis=-1, dtype=jnp.int32)
