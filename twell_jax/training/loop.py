"""A whole run: data, state, steps, evaluation, checkpoints, report."""

import collections
import dataclasses
import itertools
import json
import pathlib
import time

import jax
import numpy as np
from absl import logging
from flax import nnx

from twell_jax.console import console
from twell_jax.data import store
from twell_jax.data.pipeline import training_dataset
from twell_jax.data.preparation import PrepareOptions, prepare
from twell_jax.data.stdlib import stdlib_files
from twell_jax.data.tokenizer import load_tokenizer
from twell_jax.environment import describe_environment
from twell_jax.errors import ConfigError
from twell_jax.flops import peak_flops, train_flops_per_token
from twell_jax.generate import generate
from twell_jax.training import report
from twell_jax.training.checkpoint import Checkpointer
from twell_jax.training.config import STDLIB, Config
from twell_jax.training.evaluate import Evaluation, evaluate
from twell_jax.training.metrics import MetricsWriter
from twell_jax.training.progress import TrainingProgress
from twell_jax.training.state import (
    TrainState,
    abstract_state,
    count_params,
    initial_state,
    model_graph,
)
from twell_jax.training.step import make_eval_step, make_train_step

CONFIG_FILE = "config.json"

# Steps left out of the timing: the first ones compile.
_UNTIMED_STEPS = 5


class NonFiniteError(RuntimeError):
    """A step had a NaN or inf in its loss or gradient."""


def train(config: Config, workdir: str | pathlib.Path) -> dict:
    """Trains, or goes on with the run that `workdir` holds; returns the summary.

    Writes into `workdir`: config.json, metrics.jsonl, tensorboard/, checkpoints/,
    activation_sparsity.png and, when the run is finished, summary.json.

    Raises:
      ConfigError: the configuration is wrong, or not that of the run in `workdir`.
      DataError: the data cannot be used.
      NonFiniteError: a loss or gradient was not finite and `train.on_nonfinite` is "stop".
    """
    config.validate()
    workdir = pathlib.Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    data_path = _find_data(config, workdir)
    checkpointer = Checkpointer(workdir / "checkpoints", config.checkpoint)
    try:
        return _Run(config, workdir, data_path, checkpointer).run()
    finally:
        checkpointer.close()


def _find_data(config: Config, workdir: pathlib.Path) -> str:
    """The prepared folder; makes that of the standard library if need be. Checks the vocabulary."""
    path = config.data.path
    if path == STDLIB:
        path = str(workdir / "data")
        if not pathlib.Path(path).exists():
            options = PrepareOptions(
                inputs=stdlib_files(config.data.stdlib_max_bytes),
                vocab_size=config.data.stdlib_vocab_size,
                validation_fraction=0.02,
            )
            prepare(options, path)
    vocab_size = store.read_manifest(path)["vocab_size"]
    if vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"--config.model.vocab_size: {config.model.vocab_size} is less than the {vocab_size} "
            f"tokens of the data in {path}"
        )
    return path


class _Run:
    """The parts of one run, and the order in which they work."""

    def __init__(self, config, workdir, data_path, checkpointer):
        self.config = config
        self.workdir = workdir
        self.data_path = data_path
        self.checkpointer = checkpointer
        self.train_step = jax.jit(make_train_step(config), donate_argnums=0)
        self.eval_step = jax.jit(make_eval_step(config))
        self.batches = iter(
            training_dataset(
                data_path,
                sequence_length=config.data.sequence_length,
                batch_size=config.train.batch_size,
                seed=config.train.seed,
                process_index=jax.process_index(),
                process_count=jax.process_count(),
            )
        )
        self.step_seconds: list[float] = []

    def run(self) -> dict:
        """Everything from the newest checkpoint, or the beginning, to the summary."""
        state, step = self._restore()
        summary_path = self.workdir / report.SUMMARY_FILE
        if step >= self.config.train.num_steps and summary_path.is_file():
            console.print(f"finished at step {step}: nothing left to train ({summary_path})")
            return json.loads(summary_path.read_text())
        summary_path.unlink(missing_ok=True)  # of an earlier, shorter run
        config_path = self.workdir / CONFIG_FILE
        config_path.write_text(json.dumps(dataclasses.asdict(self.config), indent=2) + "\n")
        if jax.device_count() > 1:
            logging.warning("%d devices are visible, one is used", jax.device_count())
        logging.info(
            "%s parameters; steps %d to %d on %s",
            f"{count_params(state.params):,}",
            step,
            self.config.train.num_steps,
            jax.devices()[0].device_kind,
        )
        metrics = MetricsWriter(self.workdir, resumed_step=step)
        try:
            state = self._train(state, step, metrics)
            evaluation = self._evaluate(self.config.train.num_steps, state, metrics)
        finally:
            metrics.close()
        return self._report(state, evaluation)

    def _restore(self) -> tuple[TrainState, int]:
        step = self.checkpointer.latest_step()
        if step is None:
            return jax.jit(lambda: initial_state(self.config))(), 0
        state, data_state = self.checkpointer.restore(
            step, abstract_state(self.config), self.config
        )
        self.batches.set_state(data_state)
        logging.info("resumed from %s", self.checkpointer.path(step))
        return state, step

    def _save(self, step: int, state: TrainState, data_state: dict) -> None:
        self.checkpointer.save(step, state, data_state, self.config)

    def _train(self, state: TrainState, first_step: int, metrics: MetricsWriter) -> TrainState:
        config = self.config
        num_steps = config.train.num_steps
        data_state = self.batches.get_state()
        # Metrics are read one step late, so that the device always has work queued.
        pending = collections.deque()
        clock = _Clock()
        with TrainingProgress(num_steps, first_step) as progress:
            for step in range(first_step + 1, num_steps + 1):
                batch = next(self.batches)
                data_state = self.batches.get_state()
                state, step_metrics = self.train_step(state, batch)
                pending.append((step, step_metrics))
                evaluates = _every(step, config.log.evaluate_every_steps) and step < num_steps
                saves = _every(step, config.checkpoint.every_steps) or step == num_steps
                pauses = evaluates or saves
                while len(pending) > (0 if pauses else 1):
                    done, values = pending.popleft()
                    self._finish_step(done, jax.device_get(values), metrics, progress, clock)
                if saves:
                    self._save(step, state, data_state)
                if evaluates:
                    self._evaluate(step, state, metrics)
                if pauses:
                    clock.restart()
        self.checkpointer.wait()
        self.step_seconds = clock.step_seconds
        return state

    def _finish_step(self, step, values, metrics, progress, clock) -> None:
        """Takes in the metrics of a step that the device has finished."""
        clock.tick()
        if not values["finite"]:
            self._handle_nonfinite(step, values)
        progress.step(step)
        if _every(step, self.config.log.every_steps) or step == self.config.train.num_steps:
            row = {
                name: np.asarray(value, np.float64).tolist()
                for name, value in values.items()
                if name not in ("finite", "num_targets")
            }
            seconds = clock.recent_step_seconds()
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
        self.checkpointer.wait()
        latest = self.checkpointer.latest_step()
        last_good = "none yet" if latest is None else str(self.checkpointer.path(latest))
        message = (
            f"step {step}: loss {values['loss']:g}, gradient norm {values['grad_norm']:g}, "
            f"cross-entropy {values['cross_entropy']:g}{layers}. The update was discarded. "
            f"Last good checkpoint: {last_good}"
        )
        if self.config.train.on_nonfinite == "stop":
            raise NonFiniteError(message)
        logging.warning("skipped %s", message)

    def _evaluate(self, step: int, state: TrainState, metrics: MetricsWriter) -> Evaluation:
        evaluation = evaluate(self.config, self.data_path, self.eval_step, state.params)
        row = {name: v for name, v in dataclasses.asdict(evaluation).items() if v is not None}
        metrics.write(step, "validation", row)
        logging.info("step %d: validation cross-entropy %.4f", step, evaluation.cross_entropy)
        return evaluation

    def _report(self, state: TrainState, evaluation: Evaluation) -> dict:
        config = self.config
        report.print_evaluation(evaluation, config.model.intermediate_size)
        self._print_sample(state)
        report.plot_sparsity(self.workdir, config.model.intermediate_size)
        summary = {
            "step": config.train.num_steps,
            "num_params": count_params(state.params),
            "num_skipped": int(state.num_skipped),
            "validation": dataclasses.asdict(evaluation),
            "l1_coefficient": float(state.l1.coefficient),
            "speed": self._speed(),
            "environment": describe_environment(),
        }
        path = self.workdir / report.SUMMARY_FILE
        path.write_text(json.dumps(summary, indent=2) + "\n")
        console.print("outputs:")
        for entry in sorted(self.workdir.iterdir()):
            console.print(f"  {entry}{'/' if entry.is_dir() else ''}", markup=False)
        return summary

    def _speed(self) -> dict | None:
        """Step time and throughput of the timed steps of this process; None without any."""
        if not self.step_seconds:
            return None
        config = self.config
        p20, median, p80 = np.percentile(self.step_seconds, [20, 50, 80])
        tokens_per_second = config.train.batch_size * config.data.sequence_length / median
        flops = train_flops_per_token(config.model, config.data.sequence_length)
        peak = peak_flops(jax.devices()[0].device_kind)
        return {
            "timed_steps": len(self.step_seconds),
            "step_ms": {"median": 1e3 * median, "p20": 1e3 * p20, "p80": 1e3 * p80},
            "tokens_per_second": tokens_per_second,
            "model_tflops_per_second": flops * tokens_per_second / 1e12,
            "mfu": flops * tokens_per_second / peak if peak else None,
        }

    def _print_sample(self, state: TrainState) -> None:
        config = self.config
        if not config.log.sample_tokens:
            return
        tokenizer = load_tokenizer(pathlib.Path(self.data_path) / store.TOKENIZER)
        if config.log.sample_prompt:
            prompt = tokenizer.encode(config.log.sample_prompt, add_special_tokens=False).ids
        else:
            stream = store.TokenStream(self.data_path, "validation")
            prompt = stream.read(0, min(16, stream.num_tokens))[0]
        model = nnx.merge(model_graph(config.model), state.params)
        tokens = generate(
            model,
            np.asarray([prompt], np.int32),
            num_tokens=config.log.sample_tokens,
            temperature=config.log.sample_temperature,
            key=jax.random.key(config.train.seed),
        )
        # A vocabulary that is padded to a rounder size has ids without a token.
        known = [t for t in np.asarray(tokens[0]).tolist() if t < tokenizer.get_vocab_size()]
        text = tokenizer.decode(known, skip_special_tokens=False)
        console.rule("sample")
        console.print(text, markup=False)
        console.rule()


class _Clock:
    """Seconds between finished steps, without compilation and pauses."""

    def __init__(self):
        self.step_seconds: list[float] = []
        self._last: float | None = None
        self._to_skip = _UNTIMED_STEPS

    def restart(self) -> None:
        """What happened since the last tick is not a step's time."""
        self._last = None

    def tick(self) -> None:
        """A step has finished."""
        now = time.perf_counter()
        if self._to_skip:
            self._to_skip -= 1
        elif self._last is not None:
            self.step_seconds.append(now - self._last)
        self._last = now

    def recent_step_seconds(self) -> float | None:
        """Median over the last steps, or None before the first timed one."""
        recent = list(itertools.islice(reversed(self.step_seconds), 20))
        return float(np.median(recent)) if recent else None


def _every(step: int, period: int) -> bool:
    return period > 0 and step % period == 0
