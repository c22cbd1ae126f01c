"""Which backend serves a call, and what a user hears about it."""

import logging

import jax.numpy as jnp
import pytest

from pallas_kernels import BACKENDS, dispatch, sparse_ffn

X, W = jnp.ones((2, 8)), jnp.ones((4, 8))


def test_unknown_backend_lists_the_known_ones():
    with pytest.raises(ValueError, match="'cuda'; known are auto, mosaic_gpu, triton, reference"):
        sparse_ffn(X, W, W, W, backend="cuda")
    assert BACKENDS == ("auto", "mosaic_gpu", "triton", "reference")


@pytest.mark.parametrize("backend", ["mosaic_gpu", "triton"])
def test_gpu_backends_refuse(backend):
    with pytest.raises(NotImplementedError, match=f"'{backend}' has no sparse_ffn"):
        sparse_ffn(X, W, W, W, backend=backend)


def test_auto_falls_through_and_says_so_once(caplog, monkeypatch):
    monkeypatch.setattr(dispatch, "_logged", set())
    with caplog.at_level(logging.WARNING, logger="pallas_kernels"):
        for _ in range(3):
            sparse_ffn(X, W, W, W)
    messages = [record.message for record in caplog.records]
    assert len(messages) == 1
    assert messages[0].startswith(
        "sparse_ffn runs on backend 'reference' (backend 'mosaic_gpu' has no "
    )


def test_auto_does_not_hide_wrong_input():
    with pytest.raises(ValueError, match="w_down: has 7 columns"):
        sparse_ffn(X, W, W, W[:, :7])
