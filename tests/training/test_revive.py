"""Reviving dead neurons: only they change, and the function does not jump."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from tests.training.helpers import make_config
from tests.training.test_step import batch_with
from twell_jax.training.revive import revive_dead_neurons
from twell_jax.training.state import initial_state, model_graph
from twell_jax.training.step import make_train_step


def logits(config, params, batch):
    model = nnx.merge(model_graph(config.model), params)
    return model(batch["inputs"], batch["segment_ids"], batch["positions"])[0]


@pytest.mark.parametrize("gated", [True, False])
def test_dead_neurons_start_anew(data_path, gated):
    config = make_config(data_path)
    config.model.gated = gated
    config.train.dead_after_steps = 2
    batch = batch_with((16,) * 8)
    state = initial_state(config)
    first = "w_gate" if gated else "w_up"
    # Neurons 5 to 14 of layer 0 cannot fire: their first row is all zero.
    ffn = state.params["blocks"][0]["ffn"]
    ffn[first] = ffn[first].at[5:15].set(0)
    step = jax.jit(make_train_step(config))
    for _ in range(2):
        state, _ = step(state, batch)
    # A little decay aside, the rows are still zero; give their moments something to forget.
    moments = state.opt_state[1].mu["blocks"][0]["ffn"]
    moments[first] = moments[first].at[5:15].set(7.0)

    revived, numbers = jax.jit(lambda s: revive_dead_neurons(config, s))(state)
    np.testing.assert_array_equal(numbers, [10, 0])
    np.testing.assert_array_equal(revived.steps_since_fired[0, 5:15], 0)
    before, after = state.params["blocks"], revived.params["blocks"]
    assert np.abs(after[0]["ffn"][first][5:15]).min(axis=1).max() > 0
    np.testing.assert_array_equal(after[0]["ffn"]["w_down"][5:15], 0)
    for name in ("w_gate", "w_up", "w_down") if gated else ("w_up", "w_down"):
        for moment in (revived.opt_state[1].mu, revived.opt_state[1].nu):
            np.testing.assert_array_equal(moment["blocks"][0]["ffn"][name][5:15], 0)
            assert np.abs(moment["blocks"][0]["ffn"][name][:5]).max() > 0
        others = np.r_[0:5, 15:64]
        np.testing.assert_array_equal(after[0]["ffn"][name][others], before[0]["ffn"][name][others])
    jax.tree.map(np.testing.assert_array_equal, after[1], before[1])
    np.testing.assert_array_equal(
        logits(config, revived.params, batch), logits(config, state.params, batch)
    )

    # They fire, and their down rows learn.
    later, metrics = step(revived, batch)
    assert metrics["dead_fraction"][0] == 0
    fired_now = np.asarray(later.steps_since_fired[0, 5:15]) == 0
    assert fired_now.mean() > 0.5
    assert np.abs(later.params["blocks"][0]["ffn"]["w_down"][5:15]).max() > 0


def test_draws_depend_on_the_step_and_the_seed(data_path):
    config = make_config(data_path)
    config.train.dead_after_steps = 1
    state = initial_state(config)
    dead = dataclasses.replace(state, steps_since_fired=state.steps_since_fired + 1)

    def gate(state, seed=0):
        seeded = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed))
        return revive_dead_neurons(seeded, state)[0].params["blocks"][1]["ffn"]["w_gate"]

    np.testing.assert_array_equal(gate(dead), gate(dead))
    later = dataclasses.replace(dead, step=dead.step + 1)
    assert (gate(later) != gate(dead)).all()
    assert (gate(dead, seed=1) != gate(dead)).all()
