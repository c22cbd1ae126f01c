"""A whole run: data, state, steps, evaluation, checkpoints, report."""

import collections
import dataclasses
import json
import pathlib

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from twell_jax.console import console
from twell_jax.data import store
from twell_jax.data.pipeline import training_dataset
from twell_jax.environment import describe_environment
from twell_jax.errors import ConfigError
from twell_jax.flops import peak_flops, train_flops_per_token
from twell_jax.sharding import batch_sharding, batch_share, shardings
from twell_jax.training import preflight, report
from twell_jax.training.checkpoint import Checkpointer
from twell_jax.training.clock import StepClock
from twell_jax.training.config import Config
from twell_jax.training.evaluate import Evaluation, evaluate
from twell_jax.training.metrics import MetricsWriter
from twell_jax.training.progress import TrainingProgress
from twell_jax.training.replan import Replanning
from twell_jax.training.revive import revive_dead_neurons
from twell_jax.training.sample import print_sample
from twell_jax.training.signals import StoppedBySignalError, StopSignals
from twell_jax.training.state import TrainState, abstract_state, count_params, initial_state
from twell_jax.training.step import make_eval_step, make_train_step

CONFIG_FILE = "config.json"


class NonFiniteError(RuntimeError):
    """A step had a NaN or inf in its loss or gradient."""


def train(config: Config, workdir: str | pathlib.Path) -> dict:
    """Trains, or goes on with the run that `workdir` holds; returns the summary.

    Uses all devices of all processes, as `config.mesh` says. Writes into `workdir`:
    config.json, metrics.jsonl, tensorboard/, checkpoints/, activation_sparsity.png and,
    when the run is finished, summary.json.

    Raises:
      ConfigError: the configuration is wrong, or not that of the run in `workdir`.
      DataError: the data cannot be used.
      CheckpointError: there are checkpoints, all of them damaged.
      NonFiniteError: a loss or gradient was not finite and `train.on_nonfinite` is "stop".
      StoppedBySignalError: SIGTERM or SIGINT came, and the state was saved.
    """
    config.validate()
    mesh = preflight.make_config_mesh(config)
    preflight.check_backend(config, mesh)
    workdir = preflight.make_workdir(pathlib.Path(workdir))
    data_path = preflight.find_data(config, workdir)
    checkpointer = Checkpointer(
        workdir / "checkpoints", config.checkpoint, store.fingerprint(data_path)
    )
    try:
        with jax.set_mesh(mesh):
            return _Run(config, workdir, data_path, mesh, checkpointer).run()
    finally:
        checkpointer.close()


class _Run:
    """The parts of one run, and the order in which they work."""

    def __init__(self, config, workdir, data_path, mesh, checkpointer):
        self.config = config
        self.workdir = workdir
        self.data_path = data_path
        self.checkpointer = checkpointer
        self.is_primary = jax.process_index() == 0
        self.batch_sharding = batch_sharding(mesh)
        self.state_shardings = shardings(mesh, abstract_state(config))
        # Numbers that the host reads are on every device: a process can read its own only.
        self.everywhere = everywhere = NamedSharding(mesh, PartitionSpec())
        self.replanning = Replanning(config, mesh, self.state_shardings)
        self.compiled_plans = ()
        self.revive = jax.jit(
            lambda state: revive_dead_neurons(config, state),
            out_shardings=(self.state_shardings, everywhere),
            donate_argnums=0,
        )
        try:
            part, num_parts = batch_share(self.batch_sharding, config.train.batch_size)
        except ValueError as error:
            raise ConfigError(f"--config.mesh: {error}") from None
        self.batches = iter(
            training_dataset(
                data_path,
                sequence_length=config.data.sequence_length,
                batch_size=config.train.batch_size,
                seed=config.train.seed,
                part=part,
                num_parts=num_parts,
            )
        )
        self.clock = StepClock()
        self.skipped_in_a_row = 0

    def _use_plans(self) -> None:
        """Jits the steps anew if the plans are not those that they were made with."""
        plans = self.replanning.plans
        if plans == self.compiled_plans:
            return
        self.compiled_plans = plans
        self.train_step = jax.jit(
            make_train_step(self.config, plans),
            out_shardings=(self.state_shardings, self.everywhere),
            donate_argnums=0,
        )
        self.eval_step = jax.jit(make_eval_step(self.config, plans), out_shardings=self.everywhere)

    def run(self) -> dict:
        """Everything from the newest checkpoint, or the beginning, to the summary."""
        with StopSignals() as stop:
            return self._run(stop)

    def _run(self, stop: StopSignals) -> dict:
        num_steps = self.config.train.num_steps
        state, step = self._restore()
        self._use_plans()
        summary_path = self.workdir / report.SUMMARY_FILE
        if step >= num_steps and summary_path.is_file():
            console.print(f"finished at step {step}: nothing left to train ({summary_path})")
            return json.loads(summary_path.read_text())
        if self.is_primary:
            summary_path.unlink(missing_ok=True)  # of an earlier, shorter run
            text = json.dumps(dataclasses.asdict(self.config), indent=2) + "\n"
            (self.workdir / CONFIG_FILE).write_text(text)
        logging.info(
            "%s parameters; steps %d to %d on %d x %s",
            f"{count_params(state.params):,}",
            step,
            num_steps,
            jax.device_count(),
            jax.devices()[0].device_kind,
        )
        metrics = MetricsWriter(self.workdir, resumed_step=step, writes=self.is_primary)
        try:
            if 0 < step < num_steps and _every(step, self.config.log.evaluate_every_steps):
                # The process before may have been stopped between saving and evaluating.
                self._evaluate(step, state, metrics)
            with stop.deferred():
                state = self._train(state, step, metrics, stop)
            evaluation = self._evaluate(max(step, num_steps), state, metrics)
        finally:
            metrics.close()
        return self._report(state, evaluation)

    def _restore(self) -> tuple[TrainState, int]:
        abstract = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            abstract_state(self.config),
            self.state_shardings,
        )
        restored = self.checkpointer.restore_latest(abstract, self.config)
        if restored is None:
            return initial_state(self.config, self.state_shardings), 0
        state, data_state, plans, step = restored
        self.batches.set_state(data_state)
        self.replanning.set_state(plans)
        logging.info("resumed from %s", self.checkpointer.path(step))
        return state, step

    def _train(
        self, state: TrainState, first_step: int, metrics: MetricsWriter, stop: StopSignals
    ) -> TrainState:
        config = self.config
        num_steps = config.train.num_steps
        # Metrics are read one step late, so that the device always has work queued.
        pending = collections.deque()
        with TrainingProgress(num_steps, first_step) as progress:
            for step in range(first_step + 1, num_steps + 1):
                batch = self._to_devices(next(self.batches))
                data_state = self.batches.get_state()
                state, step_metrics = self.train_step(state, batch)
                if _every(step, config.train.revive_every_steps):
                    state, step_metrics["num_revived"] = self.revive(state)
                pending.append((step, step_metrics))

                stops = self._agree_to_stop(stop, step)
                evaluates = _every(step, config.log.evaluate_every_steps) and step < num_steps
                saves = stops or _every(step, config.checkpoint.every_steps) or step == num_steps
                replans = self.replanning.is_due(step)
                pauses = evaluates or saves or replans
                while len(pending) > (0 if pauses else 1):
                    done, values = pending.popleft()
                    self._finish_step(done, jax.device_get(values), metrics, progress)
                if replans:
                    state = self.replanning.remake(step, state, metrics)
                    self._use_plans()
                if saves:
                    plans = self.replanning.state()
                    self.checkpointer.save(step, state, data_state, plans, config)
                if stops:
                    self.checkpointer.wait()
                    raise StoppedBySignalError(stops, step)
                if evaluates:
                    self._evaluate(step, state, metrics)
                if pauses:
                    self.clock.restart()
        self.checkpointer.wait()
        return state

    def _to_devices(self, batch):
        batch_size = self.config.train.batch_size
        return {
            name: jax.make_array_from_process_local_data(
                self.batch_sharding, array, (batch_size, *array.shape[1:])
            )
            for name, array in batch.items()
        }

    def _agree_to_stop(self, stop: StopSignals, step: int) -> int:
        """The signal that ends the run after this step, the same on all processes; or 0."""
        received = stop.received or 0
        if jax.process_count() == 1:
            return received
        if not _every(step, self.config.log.every_steps):
            return 0
        return int(np.max(multihost_utils.process_allgather(np.int32(received))))

    def _finish_step(self, step, values, metrics, progress) -> None:
        """Takes in the metrics of a step that the devices have finished."""
        self.clock.tick()
        self.skipped_in_a_row = 0 if values["finite"] else self.skipped_in_a_row + 1
        if not values["finite"]:
            self._handle_nonfinite(step, values)
        progress.step(step)
        if (num_revived := values.pop("num_revived", None)) is not None:
            metrics.write(step, "revive", {"num_revived": num_revived.tolist()})
        if _every(step, self.config.log.every_steps) or step == self.config.train.num_steps:
            row = {
                name: np.asarray(value, np.float64).tolist()
                for name, value in values.items()
                if name not in ("finite", "num_targets")
            }
            seconds = self.clock.recent_step_seconds()
            if seconds:
                tokens = self.config.train.batch_size * self.config.data.sequence_length
                row["tokens_per_second"] = tokens / seconds
            metrics.write(step, "train", row)
            progress.show(step, row)

    def _handle_nonfinite(self, step, values) -> None:
        layers = ""
        if "l0" in values:
            l0 = ", ".join(f"{n:.1f}" for n in values["l0"])
            dead = ", ".join(f"{share:.1%}" for share in values["dead_fraction"])
            layers = f"; L0 by layer: {l0}; dead: {dead}"
        message = (
            f"step {step}: loss {values['loss']:g}, gradient norm {values['grad_norm']:g}, "
            f"cross-entropy {values['cross_entropy']:g}{layers}. The update was discarded"
        )
        gives_up = self.skipped_in_a_row >= self.config.train.max_skipped_in_a_row
        if self.config.train.on_nonfinite == "skip" and not gives_up:
            logging.warning("skipped %s", message)
            return
        if gives_up:
            message += f", as were those of the {self.skipped_in_a_row - 1} steps before"
        # No checkpoint has a discarded update in it, so the newest one is good.
        self.checkpointer.wait()
        latest = self.checkpointer.latest_step()
        last_good = "none yet" if latest is None else str(self.checkpointer.path(latest))
        raise NonFiniteError(f"{message}. Last good checkpoint: {last_good}")

    def _evaluate(self, step: int, state: TrainState, metrics: MetricsWriter) -> Evaluation:
        evaluation = evaluate(
            self.config, self.data_path, self.eval_step, state.params, self.batch_sharding
        )
        row = {name: v for name, v in dataclasses.asdict(evaluation).items() if v is not None}
        metrics.write(step, "validation", row)
        logging.info("step %d: validation cross-entropy %.4f", step, evaluation.cross_entropy)
        return evaluation

    def _report(self, state: TrainState, evaluation: Evaluation) -> dict:
        config = self.config
        report.print_evaluation(evaluation, config.model.intermediate_size)
        print_sample(config, self.data_path, state.params)
        summary = {
            "step": config.train.num_steps,
            "num_params": count_params(state.params),
            "num_skipped": int(state.num_skipped),
            "validation": dataclasses.asdict(evaluation),
            "l1_coefficient": float(state.l1.coefficient),
            "training": report.training_summary(self.workdir, config.train.num_steps),
            "speed": self._speed(),
            "environment": describe_environment(),
        }
        if self.is_primary:
            report.plot_sparsity(self.workdir, config.model.intermediate_size)
            path = self.workdir / report.SUMMARY_FILE
            path.write_text(json.dumps(summary, indent=2) + "\n")
            report.print_outputs(self.workdir)
        return summary

    def _speed(self) -> dict | None:
        """Step time and throughput of the timed steps of this process; None without any."""
        seconds = self.clock.step_seconds
        if not seconds:
            return None
        config = self.config
        p20, median, p80 = np.percentile(seconds, [20, 50, 80])
        tokens_per_second = config.train.batch_size * config.data.sequence_length / median
        flops = train_flops_per_token(config.model, config.data.sequence_length)
        peak = peak_flops(jax.devices()[0].device_kind)
        return {
            "timed_steps": len(seconds),
            "step_ms": {"median": 1e3 * median, "p20": 1e3 * p20, "p80": 1e3 * p80},
            "tokens_per_second": tokens_per_second,
            "model_tflops_per_second": flops * tokens_per_second / 1e12,
            "mfu": flops * tokens_per_second / (peak * jax.device_count()) if peak else None,
        }


def _every(step: int, period: int) -> bool:
    return period > 0 and step % period == 0
