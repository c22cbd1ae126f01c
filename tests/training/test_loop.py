"""Whole runs: outputs, resume, refusals."""

import dataclasses
import json
import os
import pathlib
import signal

import jax
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.training.helpers import make_config
from twell_jax.data.store import TokenStream, fingerprint
from twell_jax.data.windows import TokenWindows
from twell_jax.errors import ConfigError
from twell_jax.training.checkpoint import Checkpointer
from twell_jax.training.loop import NonFiniteError, _Run, train
from twell_jax.training.metrics import MetricsWriter, read_metrics
from twell_jax.training.signals import StoppedBySignalError
from twell_jax.training.state import abstract_state


@pytest.fixture(scope="module")
def finished(data_path, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run")
    config = make_config(data_path)
    config.log.evaluate_every_steps = 6
    summary = train(config, workdir)
    return config, workdir, summary


def final_state(config, workdir):
    checkpointer = Checkpointer(
        pathlib.Path(workdir) / "checkpoints", config.checkpoint, fingerprint(config.data.path)
    )
    state, data_state, _, _ = checkpointer.restore_latest(abstract_state(config), config)
    checkpointer.close()
    return state, data_state


def rows_without_speed(workdir):
    return [
        {name: value for name, value in row.items() if name != "tokens_per_second"}
        for row in read_metrics(workdir)
    ]


def assert_same_run(config, workdir, other, ordered=True):
    rows, other_rows = rows_without_speed(workdir), rows_without_speed(other)
    if not ordered:
        rows, other_rows = (
            sorted(r, key=lambda row: (row["step"], row["kind"])) for r in (rows, other_rows)
        )
    assert rows == other_rows
    state, data_state = final_state(config, workdir)
    other_state, other_data_state = final_state(config, other)
    jax.tree.map(np.testing.assert_array_equal, state, other_state)
    assert data_state == other_data_state


def test_outputs(finished):
    config, workdir, summary = finished
    rows = read_metrics(workdir)
    train_rows = [row for row in rows if row["kind"] == "train"]
    assert [row["step"] for row in train_rows] == [2, 4, 6, 8, 10, 12]
    assert [row["step"] for row in rows if row["kind"] == "validation"] == [6, 12]
    assert train_rows[-1]["cross_entropy"] < train_rows[0]["cross_entropy"]
    assert {"loss", "l1", "l1_coefficient", "grad_norm", "learning_rate"} <= train_rows[0].keys()
    for name in ("l0", "dead_fraction", "max_steps_since_fired"):
        assert len(train_rows[0][name]) == 2
    assert json.loads((workdir / "config.json").read_text()) == dataclasses.asdict(config)
    assert json.loads((workdir / "summary.json").read_text()) == summary
    assert summary["validation"]["cross_entropy"] < summary["validation"]["unigram_entropy"] + 1
    assert (workdir / "activation_sparsity.png").read_bytes().startswith(b"\x89PNG")

    events = EventAccumulator(str(workdir / "tensorboard")).Reload()
    written = {e.step: e.value for e in events.Scalars("train/cross_entropy")}
    assert written == pytest.approx({row["step"]: row["cross_entropy"] for row in train_rows})
    assert "train/l0/layer_1" in events.Tags()["scalars"]
    assert "validation/l0/mean" in events.Tags()["scalars"]


def test_a_finished_run_trains_nothing(finished, capfd):
    config, workdir, summary = finished
    before = (workdir / "metrics.jsonl").stat().st_mtime_ns
    assert train(config, workdir) == summary
    assert "nothing left to train" in capfd.readouterr().err
    assert (workdir / "metrics.jsonl").stat().st_mtime_ns == before


@pytest.mark.parametrize("last_row", [2, 6, 10])
def test_an_interrupted_run_continues_bit_for_bit(finished, tmp_path, monkeypatch, last_row):
    config, workdir, _ = finished
    write = MetricsWriter.write

    def interrupt(self, step, kind, values):
        write(self, step, kind, values)
        if step == last_row:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(MetricsWriter, "write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path)
    train(config, tmp_path)
    assert_same_run(config, workdir, tmp_path)


def test_cuts_at_any_step_change_nothing(data_path, tmp_path, monkeypatch):
    """With accumulation, the controller and reviving; before the first checkpoint, at an
    epoch's end, within epoch 2, and one step before the end."""
    config = make_config(data_path)
    config.data.sequence_length = 40
    config.train.micro_batch_size = 4
    config.train.revive_every_steps = 4
    config.train.dead_after_steps = 2
    config.l1.target_l0 = 10.0
    config.l1.coefficient = config.l1.max_coefficient = 10.0  # kills some neurons at once
    config.optimizer.learning_rate = 0.1
    config.train.num_steps = 13
    windows = len(TokenWindows(TokenStream(str(data_path), "train"), 40))
    epoch_end = windows // config.train.batch_size
    cuts = (1, epoch_end, epoch_end + 3, 12)
    assert 1 < epoch_end < epoch_end + 3 < 12
    train(config, tmp_path / "whole")

    for cut in cuts:
        with monkeypatch.context() as patched:
            patched.setattr(
                _Run, "_agree_to_stop", lambda self, stop, step, cut=cut: 15 * (step == cut)
            )
            with pytest.raises(StoppedBySignalError):
                train(config, tmp_path / "cut")
    summary = train(config, tmp_path / "cut")
    assert summary["step"] == 13
    assert_same_run(config, tmp_path / "whole", tmp_path / "cut")
    revived = [row for row in read_metrics(tmp_path / "whole") if row["kind"] == "revive"]
    assert [row["step"] for row in revived] == [4, 8, 12]
    totals = np.sum([row["num_revived"] for row in revived], axis=0)
    assert totals.sum() > 0
    np.testing.assert_array_equal(summary["training"]["num_revived"], totals)


def test_a_stop_where_an_evaluation_is_due_loses_no_row(finished, tmp_path, monkeypatch):
    config, workdir, _ = finished
    with monkeypatch.context() as patched:
        patched.setattr(_Run, "_agree_to_stop", lambda self, stop, step: 15 * (step == 6))
        with pytest.raises(StoppedBySignalError):
            train(config, tmp_path)
    # And a process that dies before its summary is written leaves no second row.
    with monkeypatch.context() as patched:
        patched.setattr(_Run, "_report", lambda *_: {})
        train(config, tmp_path)
    train(config, tmp_path)
    assert_same_run(config, workdir, tmp_path, ordered=False)


def test_a_signal_while_evaluating_stops_at_once(finished, tmp_path, monkeypatch):
    """Everything is saved then."""
    config, workdir, _ = finished
    evaluate = _Run._evaluate

    def signalled(self, step, state, metrics):
        if step == 12:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(self, step, state, metrics)

    with monkeypatch.context() as patched:
        patched.setattr(_Run, "_evaluate", signalled)
        with pytest.raises(
            StoppedBySignalError, match="SIGTERM: stopped; nothing was left to save"
        ):
            train(config, tmp_path)
    train(config, tmp_path)
    assert_same_run(config, workdir, tmp_path)


def test_what_the_summary_says_of_the_training(finished):
    _, workdir, summary = finished
    last = [row for row in read_metrics(workdir) if row["kind"] == "train"][-1]
    tail = summary["training"]["last_tenth"]
    assert tail["l0"] == last["l0"]
    assert tail["dead_fraction"] == last["dead_fraction"]
    assert summary["training"]["num_revived"] is None


def test_a_longer_run_continues_a_finished_one(finished, tmp_path):
    config, _, _ = finished
    first = dataclasses.replace(config, train=dataclasses.replace(config.train, num_steps=8))
    assert train(first, tmp_path)["step"] == 8
    assert train(config, tmp_path)["step"] == 12
    steps = [row["step"] for row in read_metrics(tmp_path) if row["kind"] == "train"]
    assert steps == [2, 4, 6, 8, 10, 12]


def test_another_configuration_is_refused(finished):
    config, workdir, _ = finished
    changed = dataclasses.replace(
        config,
        l1=dataclasses.replace(config.l1, coefficient=5e-3),
        log=dataclasses.replace(config.log, every_steps=3),
    )
    with pytest.raises(ConfigError) as error:
        train(changed, workdir)
    assert "--config.l1.coefficient: 0.001 in the checkpoint, 0.005 now" in str(error.value)
    assert "log.every_steps:" not in str(error.value)


def test_dense_baseline(data_path, tmp_path):
    config = make_config(data_path)
    config.model.ffn = "dense"
    config.model.activation = "silu"
    config.train.num_steps = 4
    with pytest.raises(ValueError, match=r"--config\.l1\.coefficient: the dense layer has no"):
        train(config, tmp_path)
    config.l1.coefficient = 0.0
    summary = train(config, tmp_path)
    assert summary["validation"]["l0"] is None
    assert np.isfinite(summary["validation"]["cross_entropy"])


def test_a_non_finite_loss_stops_the_run(data_path, tmp_path):
    config = make_config(data_path)
    config.checkpoint.every_steps = 1
    config.optimizer = dataclasses.replace(
        config.optimizer, learning_rate=1e30, warmup_steps=0, clip_norm=0.0
    )
    with pytest.raises(NonFiniteError) as error:
        train(config, tmp_path)
    assert "step 2: loss" in str(error.value)
    assert "L0 by layer: " in str(error.value)
    assert f"Last good checkpoint: {tmp_path / 'checkpoints' / '1'}" in str(error.value)

    config.train.on_nonfinite = "skip"
    config.train.max_skipped_in_a_row = 5
    message = r"step 6: loss .* those of the 4 steps before\. Last good checkpoint: .*/checkpoints/"
    with pytest.raises(NonFiniteError, match=message):
        train(config, tmp_path)
    config.train.max_skipped_in_a_row = 20
    summary = train(config, tmp_path)
    assert summary["step"] == 12
    assert summary["num_skipped"] == 11


def test_a_vocabulary_that_is_too_small_is_named(data_path, tmp_path):
    config = make_config(data_path)
    config.model.vocab_size = 100
    with pytest.raises(ValueError, match=r"--config\.model\.vocab_size: 100 is less than the 259"):
        train(config, tmp_path)


def test_rows_past_the_resumed_step_are_dropped(tmp_path):
    rows = [{"step": step, "kind": "train", "loss": float(step)} for step in (1, 2, 3)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 4, "ki')
    writer = MetricsWriter(tmp_path, resumed_step=2)
    writer.write(3, "train", {"loss": 9.0})
    writer.close()
    assert [row["loss"] for row in read_metrics(tmp_path)] == [1.0, 2.0, 9.0]
