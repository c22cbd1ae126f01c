"""Remakes the plans of a run between its steps: reads statistics, decides, reorders the state."""

import jax
from absl import logging
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels import FfnPlan
from twell_jax.sharding import TENSOR
from twell_jax.training import preflight
from twell_jax.training.config import Config
from twell_jax.training.metrics import MetricsWriter
from twell_jax.training.planner import Planner
from twell_jax.training.reorder import reorder_neurons
from twell_jax.training.state import TrainState


class Replanning:
    """The planner of a run, if kernels serve its backward pass; else it plans nothing."""

    def __init__(self, config: Config, mesh: jax.sharding.Mesh, state_shardings: TrainState):
        self._every_steps = config.plan.every_steps
        self._num_steps = config.train.num_steps
        num_shards = mesh.shape[TENSOR]
        self._planner = None
        if self._every_steps and preflight.trains_by_kernels(config, mesh):
            self._planner = Planner(config.plan, config.model, num_shards)
        # Without a planner, those of the run that is continued are kept for a later one.
        self._saved = None
        # Every process must be able to read all of it.
        self._read = jax.jit(
            lambda activity: (
                activity.firing_rates / activity.weight,
                activity.dense_share / activity.weight,
            ),
            out_shardings=NamedSharding(mesh, PartitionSpec()),
        )
        self._reorder = jax.jit(
            lambda state, order: reorder_neurons(state, order, num_shards),
            out_shardings=state_shardings,
            donate_argnums=0,
        )

    @property
    def plans(self) -> tuple[FfnPlan, ...] | None:
        """The present plan of each layer; None if nothing is planned."""
        return self._planner.plans if self._planner else None

    def state(self) -> dict | None:
        """For a checkpoint, as JSON."""
        return self._planner.state() if self._planner else self._saved

    def set_state(self, saved: dict | None) -> None:
        """Goes on with the plans of a checkpoint."""
        self._saved = saved
        if self._planner and saved and not self._planner.set_state(saved):
            logging.info("the plans are for another mesh.tensor: layers are dense until the next")

    def is_due(self, step: int) -> bool:
        """Whether new plans are made after this step."""
        due = self._planner and step % self._every_steps == 0 and step < self._num_steps
        return bool(due)

    def remake(self, step: int, state: TrainState, metrics: MetricsWriter) -> TrainState:
        """Makes new plans if they pay; the state with its neurons in the order of `plans`."""
        change = self._planner.remake(*jax.device_get(self._read(state.activity)))
        if change is None:
            return state
        for reason in change.reasons:
            logging.info("step %d, new plan: %s", step, reason)
        bands = [plan.dense_band for plan in self._planner.plans]
        metrics.write(step, "plan", {"dense_band": bands})
        return self._reorder(state, change.order)
