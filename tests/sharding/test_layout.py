"""`python -m twell_jax.sharding` shows what every device holds."""

from tests.preloaded import run_module


def run(*arguments):
    return run_module("twell_jax.sharding", "--config=configs/tiny.py", *arguments)


def test_layout_is_printed():
    result = run("--num_devices=8", "--config.mesh.fsdp=4", "--config.mesh.tensor=2")
    assert result.returncode == 0, result.stderr
    assert "8 devices: data 1 x fsdp 4 x tensor 2" in result.stderr
    (row,) = (line for line in result.stderr.splitlines() if " params.blocks.0.ffn.w_gate " in line)
    cells = [cell.strip() for cell in row.split("│")[1:-1]]
    name = "params.blocks.0.ffn.w_gate"
    assert cells == [name, "(512, 128)", "tensor, fsdp", "(256, 32)", "0.03"]


def test_what_does_not_fit_is_named():
    assert "does not make 8 devices" in run("--config.mesh.fsdp=3").stderr
    assert "train.batch_size: 16 does not divide over the 32" in run("--num_devices=32").stderr
