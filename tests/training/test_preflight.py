"""What is made ready before a run."""

import dataclasses

import pytest

from tests.training.helpers import make_config
from twell_jax.data import store
from twell_jax.errors import DataError
from twell_jax.training import preflight
from twell_jax.training.config import STDLIB


def test_other_options_make_other_data_of_the_standard_library(tmp_path):
    config = make_config(STDLIB)
    config.model.vocab_size = 512
    config.data = dataclasses.replace(
        config.data, stdlib_vocab_size=300, stdlib_max_bytes=2_000_000
    )
    first = preflight.find_data(config, tmp_path)
    assert preflight.find_data(config, tmp_path) == first
    config.data.stdlib_vocab_size = 301
    second = preflight.find_data(config, tmp_path)
    config.data.stdlib_max_bytes = 1_500_000
    third = preflight.find_data(config, tmp_path)
    sizes = [store.read_manifest(path)["vocab_size"] for path in (first, second, third)]
    assert sizes == [300, 301, 301]
    tokens = [store.read_manifest(path)["splits"]["train"]["tokens"] for path in (second, third)]
    assert tokens[1] < tokens[0]


def test_too_little_of_the_standard_library(tmp_path):
    config = make_config(STDLIB)
    config.data.stdlib_max_bytes = 50_000
    with pytest.raises(DataError, match=r"--config.data.stdlib_.*holds none out"):
        preflight.find_data(config, tmp_path)
