"""Eight fake devices: the same numbers on every mesh, and the collectives one expects."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.sharding.cases import CASES

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("name", CASES)
def test_on_eight_devices(name, tmp_path):
    command = [sys.executable, "-m", "tests.sharding.cases", name, str(tmp_path)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
