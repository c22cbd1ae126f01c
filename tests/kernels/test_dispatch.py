"""Which backend serves a call, and what a user hears about it."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import BACKENDS, dispatch, reference, sparse_ffn

X, W = jnp.ones((2, 8)), jnp.ones((4, 8))


def test_unknown_backend_lists_the_known_ones():
    with pytest.raises(ValueError, match="'cuda'; known are auto, mosaic_triton, mosaic_gpu, tri"):
        sparse_ffn(X, W, W, W, backend="cuda")
    assert BACKENDS == ("auto", "mosaic_triton", "mosaic_gpu", "triton", "reference")


# On a CPU for its device, on a GPU for the dtype.
@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("mosaic_triton", "needs a Hopper GPU|needs jax-triton|serves bfloat16"),
        ("mosaic_gpu", "needs a Hopper GPU|serves bfloat16"),
        ("triton", "needs an NVIDIA GPU|needs jax-triton|serves bfloat16"),
    ],
)
def test_gpu_backends_refuse(backend, reason):
    with pytest.raises(NotImplementedError, match=f"backend '{backend}' ({reason})"):
        sparse_ffn(X, W, W, W, backend=backend)


def test_auto_falls_through_and_says_so_once(caplog, monkeypatch):
    monkeypatch.setattr(dispatch, "_logged", set())
    with caplog.at_level(logging.WARNING, logger="pallas_kernels"):
        for _ in range(3):
            sparse_ffn(X, W, W, W)
    (message,) = [record.message for record in caplog.records]
    assert message.startswith("sparse_ffn runs on backend 'reference' (backend 'mosaic_gpu' ")


@pytest.fixture
def picky_backend(monkeypatch):
    """A backend before all others that serves up to three tokens; the rows it was run on."""
    served = []

    def check(x, *_, **__):
        if x.shape[0] > 3:
            raise NotImplementedError("'picky' serves up to 3 tokens")

    def run(x, w_gate, w_up, w_down, token_mask, **_):
        served.append(x.shape[0])
        return reference.sparse_ffn(x, w_gate, w_up, w_down, token_mask)

    picky = {"sparse_ffn": dispatch.Implementation(check, run)}
    monkeypatch.setattr(dispatch, "_OPERATIONS", {"picky": picky, **dispatch._OPERATIONS})
    monkeypatch.setattr(dispatch, "BACKENDS", ("picky", *dispatch.BACKENDS))
    return served


def test_a_backend_refuses_before_it_is_traced(picky_backend):
    """By shape, also under jit, in a gradient and in a map: whatever auto takes, it keeps."""

    def loss(x, backend="auto"):
        y, stats = sparse_ffn(x, W, W, W, backend=backend)
        return jnp.sum(y) + stats.l1

    few, many = jnp.ones((2, 8)), jnp.ones((5, 8))
    for x in (few, many):
        expected = jax.grad(lambda x: loss(x, "reference"))(x)
        picky_backend.clear()
        np.testing.assert_array_equal(jax.jit(jax.grad(loss))(x), expected)
        assert picky_backend == ([2] if x is few else [])
    jax.vmap(loss)(jnp.ones((4, 2, 8)))
    assert picky_backend == [2]
    with pytest.raises(NotImplementedError, match="'picky' serves up to 3 tokens"):
        loss(many, "picky")


def test_a_refusal_in_the_midst_of_a_trace_is_an_error(picky_backend, monkeypatch):
    def run(*_, **__):
        raise NotImplementedError("too late")

    late = {"sparse_ffn": dispatch.Implementation(lambda *_, **__: None, run)}
    monkeypatch.setitem(dispatch._OPERATIONS, "picky", late)
    with pytest.raises(NotImplementedError, match="too late"):
        sparse_ffn(X, W, W, W)


def test_auto_does_not_hide_wrong_input():
    with pytest.raises(ValueError, match="w_down: has 7 columns"):
        sparse_ffn(X, W, W, W[:, :7])
