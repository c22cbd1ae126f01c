"""train.py as a user runs it: flags, messages, a killed run."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.training.helpers import make_config
from twell_jax.training.config import Config
from twell_jax.training.metrics import read_metrics

ROOT = pathlib.Path(__file__).parents[2]


def command(*arguments):
    return [sys.executable, str(ROOT / "train.py"), *map(str, arguments)]


def run(*arguments):
    return subprocess.run(command(*arguments), capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "train.num_stepz=5",
            "train.num_stepz: no such field; did you mean --config.train.num_steps",
        ),
        ("trian.num_steps=5", "trian.num_steps: no such field"),
        ("train.num_steps=many", "--config.train.num_steps=many: invalid literal for int()"),
        ("train.on_nonfinite=explode", "train.on_nonfinite: must be one of stop, skip"),
        ("train.micro_batch_size=3", "train.micro_batch_size: must divide batch_size = 16"),
        ("model.num_heads=3", "--config.model.num_heads: must divide hidden_size"),
        ("optimizer.warmup_steps=10000", "--config.optimizer.warmup_steps: must be less than"),
        ("data.path=/nowhere", "no prepared data here"),
    ],
)
def test_a_wrong_flag_is_named(tmp_path, override, message):
    result = run(f"--workdir={tmp_path / 'run'}", f"--config.{override}")
    assert result.returncode != 0
    assert message in result.stderr + result.stdout
    assert "Traceback" not in result.stderr


def test_missing_config_file(tmp_path):
    result = run("--config=configs/none.py", f"--workdir={tmp_path}")
    assert result.returncode != 0
    assert "configs/none.py" in result.stderr
    assert "Traceback" not in result.stderr


def test_help_lists_every_field():
    text = run("--help").stdout
    for section in dataclasses.fields(Config):
        for field in dataclasses.fields(section.default_factory):
            assert f"--config.{section.name}.{field.name}=" in text
    assert "--workdir" in text


def test_a_killed_run_continues(data_path, tmp_path):
    """SIGKILL between two checkpoints; the same command then ends as if nothing had been."""
    config = make_config(data_path)
    config.train.num_steps = 400
    config.log.every_steps = 1
    config.checkpoint.every_steps = 50
    file = tmp_path / "config.py"
    file.write_text(
        "import json\n"
        "from twell_jax.modules import TransformerConfig\n"
        "from twell_jax.training.config import *\n"
        "def get_config():\n"
        f"    values = json.loads({json.dumps(dataclasses.asdict(config))!r})\n"
        "    parts = dict(model=TransformerConfig, data=DataConfig, optimizer=OptimizerConfig,\n"
        "        l1=L1Config, train=TrainConfig, log=LogConfig, checkpoint=CheckpointConfig)\n"
        "    return Config(**{name: part(**values[name]) for name, part in parts.items()})\n"
    )
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run(f"--config={file}", f"--workdir={whole}").returncode == 0

    process = subprocess.Popen(
        command(f"--config={file}", f"--workdir={cut}"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        rows = read_metrics(cut)
        if rows and rows[-1]["step"] >= 120:
            break
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    killed_at = read_metrics(cut)[-1]["step"]
    assert 120 <= killed_at < 400

    result = run(f"--config={file}", f"--workdir={cut}")
    assert result.returncode == 0
    assert "resumed from" in result.stderr

    def losses(workdir):
        rows = read_metrics(workdir)
        assert [r["step"] for r in rows if r["kind"] == "train"] == list(range(1, 401))
        return [r["loss"] for r in rows if r["kind"] == "train"]

    assert losses(cut) == losses(whole)
