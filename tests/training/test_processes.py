"""Two processes on one machine: one run, one checkpoint, one writer of logs."""

import json
import signal
import socket

import numpy as np

from tests.preloaded import run, start
from tests.training.helpers import make_config
from tests.training.test_command import wait_for_step, write_config
from twell_jax.training.metrics import read_metrics


def start_two(file, workdir):
    """Starts both processes of a run."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    return [
        start(
            f"--config={file}",
            f"--workdir={workdir}",
            f"--coordinator_address=localhost:{port}",
            "--num_processes=2",
            f"--process_id={number}",
        )
        for number in range(2)
    ]


def finish(processes):
    """(exit codes, what each wrote)."""
    written = ["".join(process.communicate(timeout=240)) for process in processes]
    return [process.returncode for process in processes], written


def test_two_processes_train_one_model(data_path, tmp_path):
    config = make_config(data_path)
    file = write_config(tmp_path, config)
    codes, written = finish(start_two(file, tmp_path / "two"))
    assert codes == [0, 0], written
    assert "2 x cpu" in written[0]
    assert "validation cross-entropy" in written[0]
    assert "validation cross-entropy" not in written[1]

    assert run(f"--config={file}", f"--workdir={tmp_path / 'one'}").returncode == 0
    one, two = (read_metrics(tmp_path / name) for name in ("one", "two"))
    assert [(row["step"], row["kind"]) for row in two] == [(r["step"], r["kind"]) for r in one]
    for name in ("loss", "l1", "l0", "grad_norm"):
        # Another order of summation, through 12 steps of Adam.
        np.testing.assert_allclose(
            [row[name] for row in two if row["kind"] == "train"],
            [row[name] for row in one if row["kind"] == "train"],
            rtol=1e-3,
        )
    names = [path.name for path in (tmp_path / "two" / "checkpoints").iterdir()]
    assert sorted(names) == ["12", "4", "8"]
    assert len(list((tmp_path / "two" / "tensorboard").iterdir())) == 1

    # A finished run is finished for both; one process can go on with it.
    codes, written = finish(start_two(file, tmp_path / "two"))
    assert codes == [0, 0], written
    assert "nothing left to train" in written[0]
    longer = run(f"--config={file}", f"--workdir={tmp_path / 'two'}", "--config.train.num_steps=14")
    assert longer.returncode == 0, longer.stderr
    assert json.loads((tmp_path / "two" / "summary.json").read_text())["step"] == 14


def test_a_tensor_axis_that_spans_processes(data_path, tmp_path):
    """Both processes then hold the same examples, and must read the same ones."""
    config = make_config(data_path)
    config.model.vocab_size = 260
    config.mesh.tensor = 2
    codes, written = finish(start_two(write_config(tmp_path, config), tmp_path / "two"))
    assert codes == [0, 0], written
    config.mesh.tensor = 1
    file = write_config(tmp_path, config)
    assert run(f"--config={file}", f"--workdir={tmp_path / 'one'}").returncode == 0
    one, two = (read_metrics(tmp_path / name) for name in ("one", "two"))
    for name in ("loss", "l1", "l0", "grad_norm"):
        np.testing.assert_allclose(
            [row[name] for row in two if row["kind"] == "train"],
            [row[name] for row in one if row["kind"] == "train"],
            rtol=1e-3,
        )


def test_a_signal_to_one_process_stops_both(data_path, tmp_path):
    config = make_config(data_path)
    config.train.num_steps = 100_000
    config.checkpoint.every_steps = 100_000
    processes = start_two(write_config(tmp_path, config), tmp_path / "run")
    wait_for_step(processes[0], tmp_path / "run", 20)
    processes[1].send_signal(signal.SIGTERM)
    codes, written = finish(processes)
    assert codes == [0, 0], written
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert int(saved.name) == read_metrics(tmp_path / "run")[-1]["step"] >= 20
