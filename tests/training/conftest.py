"""Prepared data, written once."""

import pytest

from tests.training.helpers import write_data


@pytest.fixture(scope="session")
def data_path(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))
