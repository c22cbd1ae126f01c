"""The layers that `ffn` times, and their comparison with the truth."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.ffn_truth import DisagreementError, check_rows, truth_of, worst_row
from benchmarks.timing import poison_memory
from pallas_kernels import FfnPlan, sparse_ffn

PASSES = ("forward", "train")

# Derivative of the loss by l1, over the tokens: an eighth or so of what comes through y.
_L1_SCALE = 1.0

OUTPUTS = ("y", "dx", "dw_gate", "dw_up", "dw_down")


def dense_separate(x, w_gate, w_up, w_down):
    """Three matmuls, elementwise work fused by XLA."""
    return (jax.nn.relu(x @ w_gate.T) * (x @ w_up.T)) @ w_down


def dense_merged(x, w_both, w_down):
    """Two matmuls; `w_both` has the rows of the gate, then those of up."""
    gates, up = jnp.split(x @ w_both.T, 2, axis=1)
    return (jax.nn.relu(gates) * up) @ w_down


def _dense_with_l1(x, w_gate, w_up, w_down):
    hidden = jax.nn.relu(x @ w_gate.T) * (x @ w_up.T)
    l1 = jnp.mean(jnp.sum(jnp.abs(hidden.astype(jnp.float32)), axis=-1))
    return (hidden @ w_down, l1), None


def _sparse_with_l1(*operands, **options):
    y, stats = sparse_ffn(*operands, **options)
    return (y, stats.l1), stats


def _with_gradients(layer):
    """`(operands, y_bar) -> (y, gradients)`."""

    def train(*arguments):
        *operands, y_bar = arguments
        y, vjp = jax.vjp(layer, *operands)
        return y, vjp(y_bar)

    return train


def _with_l1_gradients(layer):
    """`(operands, y_bar) -> (y, stats, gradients)`, those of l1 included."""

    def train(*arguments):
        *operands, y_bar = arguments
        (y, _), vjp, stats = jax.vjp(layer, *operands, has_aux=True)
        return y, stats, vjp((y_bar, jnp.float32(_L1_SCALE * len(y_bar))))

    return train


class Layers(NamedTuple):
    """Jitted functions of `(x, w_gate, w_up, w_down)`, in training of y_bar, too.

    Attributes:
      separate: dense, y or (y, gradients).
      merged: the same with `w_both` instead of w_gate and w_up.
      sparse: (y, stats) or (y, stats, gradients).
      naive: dense, returns as `sparse` does; in training it has the L1 term, as JAX adds it in
        bf16. `separate` and `merged` are spared it.
    """

    separate: Callable
    merged: Callable
    sparse: Callable
    naive: Callable


@functools.cache
def layers_of(backend: str, pass_name: str, plan: FfnPlan = FfnPlan()) -> Layers:  # noqa: B008
    """The layers, the same ones at every call, so that only a new shape compiles."""
    options = {"backend": backend, "plan": plan}
    sparse = functools.partial(sparse_ffn, **options)
    if pass_name == "forward":
        functions = (dense_separate, dense_merged, sparse, lambda *a: (dense_separate(*a), None))
    else:
        functions = (
            _with_gradients(dense_separate),
            _with_gradients(dense_merged),
            _with_l1_gradients(functools.partial(_sparse_with_l1, **options)),
            _with_l1_gradients(_dense_with_l1),
        )
    return Layers(*map(jax.jit, functions))


def _named(result) -> dict:
    y, _, *gradients = result
    return dict(zip(OUTPUTS, (y, *(gradients[0] if gradients else ())), strict=False))


def compare(layers: Layers, layer, y_bar=None) -> dict:
    """Compares all outputs of the sparse layer with f32; returns the errors.

    Args:
      layers: of `layers_of`.
      layer: bf16 `(x, w_gate, w_up, w_down)`.
      y_bar: bf16 `[M, D]` in training.

    Raises:
      DisagreementError: a row of an output is off by more than twice the worst row of the
        reference, or a statistic is wrong.
    """
    truth = truth_of(layer, y_bar, _L1_SCALE * len(layer[0]))
    pass_name, arguments = ("forward", layer) if y_bar is None else ("train", (*layer, y_bar))
    reference = layers_of("reference", pass_name).sparse(*arguments)
    limits = {name: worst_row(rows, truth[name]) for name, rows in _named(reference).items()}
    naive = _named(layers.naive(*arguments))
    dense_errors = {name: worst_row(rows, truth[name]) for name, rows in naive.items()}
    expected = reference[1]
    del reference, naive
    poison_memory()
    result = jax.block_until_ready(layers.sparse(*arguments))
    errors = {
        name: check_rows(name, rows, truth[name], limits[name])
        for name, rows in _named(result).items()
    }
    stats = result[1]
    # Gates within a rounding of 0 may fall on either side: not many, and evenly.
    flips = np.abs(np.asarray(stats.fired) - np.asarray(expected.fired)).sum()
    values = {
        "max_row_error": max(errors.values()),
        "dense_max_row_error": max(dense_errors.values()),
        "row_errors": errors,
        "dense_row_errors": dense_errors,
        "fired_difference": int(flips),
        "fired": int(np.asarray(expected.fired).sum()),
        "l1_relative_error": abs(float(stats.l1) / float(expected.l1) - 1),
        "active": float(stats.l0),
        "num_dense": int(stats.num_dense),
    }
    if flips > 1e-4 * values["fired"] + 2 or not values["l1_relative_error"] < 2**-12:
        raise DisagreementError(f"statistics differ: {values}")
    fired = np.asarray(stats.fired).sum()
    if not np.isclose(values["active"] * len(layer[0]), fired, rtol=1e-5):
        raise DisagreementError(f"l0 and fired differ: {values}")
    return values
