"""train.py as a user runs it: flags, messages, a killed run."""

import dataclasses
import json
import pathlib
import re
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.preloaded import ROOT, run, start
from tests.training.helpers import make_config
from twell_jax.training.config import Config
from twell_jax.training.metrics import read_metrics

# Some seconds of steps, so that there is time to interfere.
NUM_STEPS = 1000


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
        ("model.param_dtype=bfloat16", "--config.model.param_dtype: training needs float32"),
        ("optimizer.b2=1.0", "--config.optimizer.b2: must be from 0 to below 1, got 1.0"),
        ("train.seed=-1", "--config.train.seed: must be at least 0"),
        ("data.path=/nowhere", "no prepared data here"),
    ],
)
def test_a_wrong_flag_is_named(tmp_path, override, message):
    result = run(f"--workdir={tmp_path / 'run'}", f"--config.{override}")
    assert result.returncode != 0
    assert message in result.stderr + result.stdout
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--workdir=", "--workdir: is empty"),
        ("--process_id=2", "--process_id: 2; with --num_processes=1 it is at most 0"),
        ("--num_processes=2", "--num_processes needs --coordinator_address"),
        ("another", "unknown arguments: another"),
        ("--config.model.ffn_backend=triton", "--config.model.ffn_backend=triton: backend"),
    ],
)
def test_what_cannot_be_run_is_refused_without_a_traceback(data_path, tmp_path, flag, message):
    file = write_config(tmp_path, make_config(data_path))
    result = run(f"--config={file}", f"--workdir={tmp_path / 'run'}", flag)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(f"train.py: {message}")
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "has no get_config()"), ("def get_config(): return {}", "must return a twell_jax")],
)
def test_a_file_that_is_no_configuration(tmp_path, content, message):
    file = tmp_path / "config.py"
    file.write_text(content)
    result = run(f"--config={file}", f"--workdir={tmp_path / 'run'}")
    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_missing_config_file(tmp_path):
    result = run("--config=configs/none.py", f"--workdir={tmp_path}")
    assert result.returncode != 0
    assert "configs/none.py" in result.stderr
    assert "Traceback" not in result.stderr


def test_help_lists_every_field():
    # Started as a user does.
    command = [sys.executable, str(ROOT / "train.py"), "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    for section in dataclasses.fields(Config):
        for field in dataclasses.fields(section.default_factory):
            assert f"--config.{section.name}.{field.name}=" in text
    assert "--workdir" in text


def write_config(folder, config) -> pathlib.Path:
    """A configuration file that gives `config`."""
    file = folder / "config.py"
    file.write_text(
        "import json\n"
        "from twell_jax.modules import TransformerConfig\n"
        "from twell_jax.training.config import *\n"
        "def get_config():\n"
        f"    values = json.loads({json.dumps(dataclasses.asdict(config))!r})\n"
        "    parts = dict(model=TransformerConfig, data=DataConfig, mesh=MeshConfig,\n"
        "        optimizer=OptimizerConfig, l1=L1Config, train=TrainConfig, log=LogConfig,\n"
        "        checkpoint=CheckpointConfig)\n"
        "    return Config(**{name: part(**values[name]) for name, part in parts.items()})\n"
    )
    return file


@pytest.fixture(scope="module")
def long_run(data_path, tmp_path_factory):
    """(configuration file, uninterrupted run) of NUM_STEPS steps with a checkpoint every 50."""
    folder = tmp_path_factory.mktemp("long")
    config = make_config(data_path)
    config.train.num_steps = NUM_STEPS
    config.log.every_steps = 1
    config.checkpoint.every_steps = 50
    file = write_config(folder, config)
    result = run(f"--config={file}", f"--workdir={folder / 'whole'}")
    assert result.returncode == 0, result.stderr
    return file, folder / "whole"


def wait_for_step(process, workdir, step):
    """Returns when the run has logged `step`."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        rows = read_metrics(workdir)
        if rows and rows[-1]["step"] >= step:
            return
        time.sleep(0.01)
    raise AssertionError(f"step {step} was not reached: {process.written()}")


def losses(workdir):
    rows = [row for row in read_metrics(workdir) if row["kind"] == "train"]
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    return [row["loss"] for row in rows]


def test_a_killed_run_continues(long_run, tmp_path):
    """SIGKILL between two checkpoints; the same command then ends as if nothing had been."""
    file, whole = long_run
    process = start(f"--config={file}", f"--workdir={tmp_path}")
    wait_for_step(process, tmp_path, 120)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert read_metrics(tmp_path)[-1]["step"] < NUM_STEPS

    result = run(f"--config={file}", f"--workdir={tmp_path}")
    assert result.returncode == 0
    assert "resumed from" in result.stderr
    assert losses(tmp_path) == losses(whole)


@pytest.mark.parametrize(("signum", "exit_code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_saves_and_stops(long_run, tmp_path, signum, exit_code):
    file, whole = long_run
    process = start(f"--config={file}", f"--workdir={tmp_path}")
    wait_for_step(process, tmp_path, 60)
    process.send_signal(signum)
    messages = process.communicate(timeout=60)[1]
    assert process.returncode == exit_code
    assert "saved and stopped after step" in messages
    assert "Traceback" not in messages
    saved = max(int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    # Where the run stopped, not at the last interval.
    assert saved == read_metrics(tmp_path)[-1]["step"]
    assert saved >= 60

    assert run(f"--config={file}", f"--workdir={tmp_path}").returncode == 0
    assert losses(tmp_path) == losses(whole)


def test_a_second_signal_leaves_at_once(long_run, tmp_path):
    file, _ = long_run
    process = start(f"--config={file}", f"--workdir={tmp_path}")
    wait_for_step(process, tmp_path, 20)
    process.send_signal(signal.SIGSTOP)  # so that both arrive before it can act on the first
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    messages = process.communicate(timeout=60)[1]
    # Python hears the lower number, SIGINT, first: SIGTERM is the second one.
    assert process.returncode == 128 + signal.SIGTERM
    assert "saved" not in messages
    steps = [int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()]
    assert all(step % 50 == 0 for step in steps)


def test_a_full_disk_ends_the_run_and_loses_nothing(long_run, tmp_path):
    """Real writes fail: no file of the process may grow past a size that it soon reaches."""
    file, whole = long_run
    process = start(f"--config={file}", f"--workdir={tmp_path}")
    wait_for_step(process, tmp_path, 120)
    # What it logs still fits, and stays readable.
    largest = max(p.stat().st_size for p in (tmp_path / "checkpoints").rglob("*") if p.is_file())
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (largest - 1, largest - 1))
    messages = process.communicate(timeout=120)[1]
    assert process.returncode == 1
    assert re.search(r"^train.py: .*File too large", messages.splitlines()[-1]), messages[-2000:]
    stopped_at = read_metrics(tmp_path)[-1]["step"]
    assert 120 <= stopped_at < NUM_STEPS

    result = run(f"--config={file}", f"--workdir={tmp_path}")
    assert result.returncode == 0
    assert "resumed from" in result.stderr
    assert losses(tmp_path) == losses(whole)


def test_a_folder_that_cannot_be_written(data_path, tmp_path):
    (tmp_path / "file").write_text("")
    for workdir in (tmp_path / "file", tmp_path / "file" / "run", "/proc/run"):
        file = write_config(tmp_path, make_config(data_path))
        result = run(f"--config={file}", f"--workdir={workdir}")
        assert result.returncode == 1
        assert f"--workdir={workdir}: " in result.stderr
        assert "Traceback" not in result.stderr


def test_twenty_random_kills(long_run, tmp_path):
    """Each takes a step at least, and loses at most the save that was being written."""
    file, whole = long_run
    arguments = (f"--config={file}", f"--workdir={tmp_path}")
    metrics = tmp_path / "metrics.jsonl"
    rng = np.random.default_rng(0)

    def wait_for(condition, what):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if (value := condition()) is not None:
                return value
            time.sleep(0.002)
        raise AssertionError(what)

    def identity():
        return metrics.stat().st_ino if metrics.is_file() else None

    def last_step(more_than=-1):
        rows = read_metrics(tmp_path)
        step = rows[-1]["step"] if rows else 0
        return step if step > more_than else None

    for life in range(20):
        before, file_before = last_step(), identity()
        process = start(*arguments)
        # Says where it goes on; then makes the file of metrics anew, without later steps.
        begins = wait_for(
            lambda process=process: re.search(r"; steps (\d+) to", process.written()[1]),
            f"life {life} did not begin",
        )
        resumed = int(begins.group(1))
        # The save that was due last may not have been complete; the one before it was.
        assert resumed >= 50 * (before // 50) - 50
        wait_for(
            lambda file_before=file_before: None if identity() == file_before else True,
            f"life {life} did not open its metrics",
        )
        wait_for(lambda resumed=resumed: last_step(resumed), f"life {life} took no step")
        time.sleep(float(rng.uniform(0.0, 0.12)))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    assert run(*arguments).returncode == 0
    assert losses(tmp_path) == losses(whole)
