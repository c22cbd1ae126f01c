"""Eight fake devices: the same numbers on every mesh, and the collectives one expects."""

import pytest

from tests.preloaded import run_module
from tests.sharding.cases import CASES


@pytest.mark.parametrize("name", CASES)
def test_on_eight_devices(name, tmp_path):
    result = run_module("tests.sharding.cases", name, tmp_path)
    assert result.returncode == 0, result.stderr[-4000:]
