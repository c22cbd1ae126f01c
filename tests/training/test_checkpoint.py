"""Damaged checkpoints, full disks, and what a resumed run may change."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from absl import logging

from tests.training.helpers import make_config
from twell_jax.data.store import MANIFEST, fingerprint
from twell_jax.errors import ConfigError
from twell_jax.training.checkpoint import Checkpointer, CheckpointError, check_same_config
from twell_jax.training.loop import train
from twell_jax.training.metrics import read_metrics
from twell_jax.training.state import abstract_state, initial_state


@pytest.fixture(scope="module")
def finished(data_path, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run")
    config = make_config(data_path)
    train(config, workdir)
    return config, workdir


@pytest.fixture
def copy(finished, tmp_path):
    config, workdir = finished
    shutil.copytree(workdir, tmp_path / "copy")
    (tmp_path / "copy" / "summary.json").unlink()
    return config, tmp_path / "copy"


def largest_file(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def flip_a_bit(folder):
    path = largest_file(folder)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(folder):
    path = largest_file(folder)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def remove_a_file(folder):
    largest_file(folder).unlink()


def losses(workdir):
    return [row["loss"] for row in read_metrics(workdir) if row["kind"] == "train"]


@pytest.mark.parametrize("damage", [flip_a_bit, truncate, remove_a_file])
def test_the_checkpoint_before_a_damaged_one_is_used(finished, copy, damage, monkeypatch):
    _, original = finished
    config, workdir = copy
    damage(workdir / "checkpoints" / "12")
    messages = []
    monkeypatch.setattr(logging, "warning", lambda text, *args: messages.append(text % args))
    train(config, workdir)
    assert any("checkpoints/12 is damaged" in message for message in messages)
    assert losses(workdir) == losses(original)
    assert [p.name for p in (workdir / "checkpoints-damaged").iterdir()] == ["12-0"]
    assert (workdir / "checkpoints" / "12").is_dir()


def test_no_usable_checkpoint_is_an_error(copy):
    config, workdir = copy
    for step in (4, 8, 12):
        truncate(workdir / "checkpoints" / str(step))
    with pytest.raises(CheckpointError, match=r"none of the checkpoints \[12, 8, 4\]"):
        train(config, workdir)
    assert (workdir / "checkpoints" / "4").is_dir()


def test_a_half_written_checkpoint_is_not_seen(copy):
    config, workdir = copy
    folder = workdir / "checkpoints"
    shutil.copytree(folder / "12", folder / "16.orbax-checkpoint-tmp")
    checkpointer = Checkpointer(folder, config.checkpoint, fingerprint(config.data.path))
    assert checkpointer.latest_step() == 12
    _, data_state, _, step = checkpointer.restore_latest(abstract_state(config), config)
    checkpointer.close()
    assert step == 12
    assert data_state == {"next_index": 12}


def test_everything_comes_back_bit_for_bit(data_path, tmp_path):
    config = make_config(data_path)
    state = initial_state(config)
    state = jax.tree.map(lambda leaf: leaf + leaf.dtype.type(3), state)
    checkpointer = Checkpointer(tmp_path / "c", config.checkpoint, "some data")
    checkpointer.save(3, state, {"next_index": 3}, {"some": "plans"}, config)
    checkpointer.wait()
    restored, data_state, plans, step = checkpointer.restore_latest(abstract_state(config), config)
    checkpointer.close()
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert (data_state, plans, step) == ({"next_index": 3}, {"some": "plans"}, 3)


def test_the_data_may_move_but_not_change(finished, copy, tmp_path):
    _, original = finished
    config, workdir = copy
    shutil.rmtree(workdir / "checkpoints" / "12")
    moved = tmp_path / "moved"
    shutil.copytree(config.data.path, moved)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, path=str(moved)))
    train(config, workdir)
    assert losses(workdir) == losses(original)

    manifest = json.loads((moved / MANIFEST).read_text())
    manifest["splits"]["train"]["documents"] += 1
    (moved / MANIFEST).write_text(json.dumps(manifest))
    config.train.num_steps = 14
    with pytest.raises(ConfigError, match=r"--config\.data\.path: .* not the data that the run"):
        train(config, workdir)
    assert sorted(p.name for p in (workdir / "checkpoints").iterdir()) == ["12", "4", "8"]


def test_a_failed_save_ends_the_run_and_loses_nothing(data_path, tmp_path, monkeypatch):
    """As a full disk would: the third save raises; the second stays."""
    config = make_config(data_path)
    save = ocp.CheckpointManager.save

    def fail(self, step, *args, **kwargs):
        if step == 12:
            raise OSError(28, "No space left on device")
        return save(self, step, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(ocp.CheckpointManager, "save", fail)
        message = "could not be written.*last whole one there is that of step 8.*No space left"
        with pytest.raises(CheckpointError, match=message):
            train(config, tmp_path)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["4", "8"]
    assert train(config, tmp_path)["step"] == 12


@pytest.mark.parametrize(
    ("section", "changes", "allowed"),
    [
        ("log", {"every_steps": 5}, True),
        ("checkpoint", {"keep": 9}, True),
        ("mesh", {"fsdp": 2}, True),
        ("train", {"num_steps": 99}, True),
        ("train", {"micro_batch_size": 4}, True),
        ("model", {"remat": "full"}, True),
        ("data", {"path": "elsewhere"}, True),
        ("train", {"batch_size": 4}, False),
        ("train", {"seed": 1}, False),
        ("model", {"num_layers": 3}, False),
        ("optimizer", {"learning_rate": 1.0}, False),
    ],
)
def test_what_a_resumed_run_may_change(data_path, section, changes, allowed):
    config = make_config(data_path)
    changed = dataclasses.replace(
        config, **{section: dataclasses.replace(getattr(config, section), **changes)}
    )
    if allowed:
        check_same_config(dataclasses.asdict(config), changed)
    else:
        (field,) = changes
        with pytest.raises(ConfigError, match=rf"--config\.{section}\.{field}: .* in the check"):
            check_same_config(dataclasses.asdict(config), changed)
