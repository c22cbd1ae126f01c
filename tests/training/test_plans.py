"""Plans in training: when they are remade, and that they change the speed alone."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import nnx

from pallas_kernels import FfnPlan
from tests.training.helpers import make_config
from tests.training.test_loop import assert_same_run
from tests.training.test_step import assert_same_step, batch_with
from twell_jax import planning
from twell_jax.modules import Transformer, TransformerConfig
from twell_jax.training import planner, preflight
from twell_jax.training.config import PlanConfig
from twell_jax.training.loop import _Run, train
from twell_jax.training.metrics import read_metrics
from twell_jax.training.planner import Planner
from twell_jax.training.reorder import reorder_neurons
from twell_jax.training.signals import StoppedBySignalError
from twell_jax.training.state import initial_state
from twell_jax.training.step import make_train_step

MODEL = TransformerConfig(hidden_size=2048, intermediate_size=5632, num_layers=2)
NOTHING = np.zeros(2)


def rates_of(*shares):
    """Of two layers of two shards: the first neurons of a shard are the idlest ones."""
    return np.stack([share * np.linspace(0, 2, 2816).repeat(2) for share in shares])


def test_a_layer_is_dense_until_it_is_sparse():
    plans = Planner(PlanConfig(), MODEL, num_shards=2)
    assert plans.plans == (FfnPlan(2816), FfnPlan(2816))
    assert plans.remake(rates_of(0.5, 0.3), NOTHING) is None
    change = plans.remake(rates_of(0.5, 0.002), NOTHING)
    (reason,) = change.reasons
    assert reason.startswith("layer 1: dense band 2816 -> 0 of 2816 neurons, L0 11.3: predicted")
    assert plans.plans == (FfnPlan(2816), FfnPlan(0))
    np.testing.assert_array_equal(change.order[0], np.arange(5632))
    np.testing.assert_array_equal(np.sort(change.order[1]), np.arange(5632))
    # A little more or less active: not worth a compilation.
    for share in (0.0019, 0.0021, 0.002):
        assert plans.remake(rates_of(0.5, share), NOTHING) is None
    # Back to dense, if it must be.
    assert "holds more active neurons" in plans.remake(rates_of(0.5, 0.3), NOTHING).reasons[0]
    assert plans.plans == (FfnPlan(2816), FfnPlan(2816))


def test_tokens_that_do_not_fit_widen_the_dense_band_for_a_while():
    plans = Planner(PlanConfig(), MODEL, num_shards=1)
    sparse = rates_of(0.002, 0.002)

    def remake(dense_share):
        """The rates move with their neurons, as they do in training."""
        change = plans.remake(sparse, dense_share)
        if change:
            sparse[:] = np.take_along_axis(sparse, change.order, axis=1)
        return change

    remake(NOTHING)
    assert plans.plans[0].dense_band < 512
    change = remake(np.array([0.05, 0.01]))
    assert change.reasons[0].endswith("5.0% of the tokens did not fit the sparse band")
    assert len(change.reasons) == 1
    assert plans.plans[0].dense_band >= 512
    changes = [remake(NOTHING) for _ in range(planner._PATIENCE)]
    assert not any(changes[:-1])
    assert changes[-1].reasons[0].startswith("layer 0: dense band")
    assert plans.plans[0].dense_band < 512


def test_plans_come_back_from_json():
    plans = Planner(PlanConfig(), MODEL, num_shards=2)
    plans.remake(rates_of(0.5, 0.002), np.array([0.0, 0.02]))
    saved = json.loads(json.dumps(plans.state()))
    restored = Planner(PlanConfig(), MODEL, num_shards=2)
    assert restored.set_state(saved)
    assert restored.state() == plans.state()
    assert restored.plans == plans.plans
    other = Planner(PlanConfig(), MODEL, num_shards=4)
    assert not other.set_state(saved)
    assert other.plans == (FfnPlan(1408), FfnPlan(1408))


@pytest.mark.parametrize("gated", [True, False])
def test_another_order_trains_alike(data_path, gated):
    """A run that is reordered after two steps follows the one that is not."""
    config = make_config(data_path)
    config.model.gated = gated
    # Updates of weights whose gradient is rounding noise would be as large as any other.
    config.optimizer.eps = 1e-4
    step = jax.jit(make_train_step(config))
    rng = np.random.default_rng(0)
    order = np.stack([np.concatenate([rng.permutation(32), 32 + rng.permutation(32)])] * 2)
    order[1] = order[1][::-1].reshape(2, 32)[::-1].reshape(-1)
    plain = reordered = initial_state(config)
    for number in range(4):
        batch = batch_with((16,) * 8, seed=number)
        plain, metrics = step(plain, batch)
        reordered, reordered_metrics = step(reordered, batch)
        for name, value in metrics.items():
            np.testing.assert_allclose(reordered_metrics[name], value, rtol=1e-4, err_msg=name)
        if number == 1:
            jax.tree.map(np.testing.assert_array_equal, plain, reordered)
            reordered = jax.jit(reorder_neurons, static_argnums=2)(reordered, order, 2)
            ffn = plain.params["blocks"][1]["ffn"]
            for name, rows in reordered.params["blocks"][1]["ffn"].items():
                np.testing.assert_array_equal(rows, ffn[name][order[1]])
    back = reorder_neurons(reordered, np.argsort(order, axis=1), 2)
    np.testing.assert_array_equal(back.steps_since_fired, plain.steps_since_fired)
    np.testing.assert_allclose(back.activity.firing_rates, plain.activity.firing_rates, atol=1e-6)
    assert_same_step((back, {}), (plain, {}), rtol=1e-4)


@pytest.fixture
def planning_for_everyone(monkeypatch):
    """The reference passes for a backend with kernels, to which small sparse bands are cheap."""
    monkeypatch.setattr(preflight, "trains_by_kernels", lambda *_: True)
    monkeypatch.setattr(planning, "_TILE", 16)
    monkeypatch.setattr(planning, "_LIST_SHARE", 1.0)
    monkeypatch.setattr(planner, "TRAINING_COSTS", planning.FfnCosts(1.0, 0.3, 1.2, 0.0))


def planned_config(data_path):
    config = make_config(data_path)
    config.plan.every_steps = 3
    config.l1.coefficient = 0.3
    return config


def test_a_run_with_plans(data_path, tmp_path, planning_for_everyone, monkeypatch):
    """It is logged what was planned; a run that is cut goes on with its plans, bit for bit."""
    config = planned_config(data_path)
    train(config, tmp_path / "whole")
    rows = [row for row in read_metrics(tmp_path / "whole") if row["kind"] == "plan"]
    assert rows
    assert {row["step"] for row in rows} <= {3, 6, 9}
    assert any(0 < band < 64 for row in rows for band in row["dense_band"])
    for cut in (3, 4, 9):
        with monkeypatch.context() as patched:
            patched.setattr(
                _Run, "_agree_to_stop", lambda self, stop, step, cut=cut: 15 * (step == cut)
            )
            with pytest.raises(StoppedBySignalError):
                train(config, tmp_path / "cut")
    train(config, tmp_path / "cut")
    assert_same_run(config, tmp_path / "whole", tmp_path / "cut")


def test_a_backend_without_gradient_kernels_plans_nothing_and_keeps_plans(
    data_path, tmp_path, planning_for_everyone, monkeypatch
):
    config = planned_config(data_path)
    train(config, tmp_path)
    planned = [row for row in read_metrics(tmp_path) if row["kind"] == "plan"]
    config.train.num_steps = 15
    used, saved = [], []
    make_step, save = make_train_step, _Run._use_plans

    def use_plans(self):
        save(self)
        used.append(self.compiled_plans)
        saved.append(self.replanning.state())

    monkeypatch.setattr(_Run, "_use_plans", use_plans)
    monkeypatch.setattr(preflight, "trains_by_kernels", lambda *_: False)
    train(config, tmp_path)
    assert set(used) == {None}
    assert [layer["plan"]["dense_band"] for layer in saved[-1]["layers"]] == (
        planned[-1]["dense_band"]
    )
    assert make_step is make_train_step
    # And back to a device with kernels.
    monkeypatch.setattr(preflight, "trains_by_kernels", lambda *_: True)
    config.train.num_steps = 16
    used.clear()
    train(config, tmp_path)
    assert [plan.dense_band for plan in used[0]] == planned[-1]["dense_band"]


def test_a_model_takes_a_plan_for_every_layer():
    config = TransformerConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2
    )
    model = Transformer(config, rngs=nnx.Rngs(0))
    plans = (FfnPlan(16), FfnPlan(0, 8))
    model.set_ffn_plans(plans)
    assert tuple(block.ffn.plan for block in model.blocks) == plans
    with pytest.raises(ValueError, match="plans: 1 for 2 layers"):
        model.set_ffn_plans(plans[:1])
    dense = Transformer(dataclasses.replace(config, ffn="dense"), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="plans: layers are dense"):
        dense.set_ffn_plans(plans)
