"""A feed-forward layer and its gradients in f32, and how far from them a row may be."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Error of a sum of products, over the norms of both factors: tensor cores cut digits off as they
# add. It matters where a sum is nearly 0, and all its digits are rounding: for y, for 1 row in
# 3000 the allowance is more than 2^-7 of the row, for the median one 4e-4.
_SUM_ROUNDING = 2.0**-20


class DisagreementError(RuntimeError):
    """An output is not what it must be, so that its time means nothing."""


class Rows(NamedTuple):
    """An output, row by row.

    Attributes:
      value: f32 `[rows, width]`.
      rounding: f32 `[rows]`, by how much, in norm, the order of sums may move a row: through the
        digits of small sums, and through gates so close to 0 that they may be open or closed.
    """

    value: jax.Array
    rounding: jax.Array


def _norms(array):
    return jnp.linalg.norm(array, axis=-1)


def _root_of_squares(deviation, norms):
    """Norm of `deviation @ rows` for independent deviations and rows of these norms."""
    return jnp.sqrt(_product("th,h->t", deviation**2, norms**2))


# Not on tensor cores, as what is judged is.
_product = functools.partial(jnp.einsum, precision="highest")


@functools.partial(jax.jit, static_argnames="differentiate")
def _piece(x, w_gate, w_up, w_down, y_bar, l1_scale, *, differentiate):
    """`Rows` of y and dx, and `(sum, squared and plain rounding)` of the weight gradients."""
    x, w_gate, w_up, w_down = (a.astype(jnp.float32) for a in (x, w_gate, w_up, w_down))
    size, up_size, gate_size, down_size = (_norms(a) for a in (x, w_up, w_gate, w_down))
    pre_gate = _product("td,hd->th", x, w_gate)
    gates, up = jax.nn.relu(pre_gate), _product("td,hd->th", x, w_up)
    gate_error = _SUM_ROUNDING * size[:, None] * gate_size
    up_error = _SUM_ROUNDING * size[:, None] * up_size
    y = _product("th,hd->td", gates * up, w_down)
    near = jnp.abs(pre_gate) <= gate_error
    on = (pre_gate > 0) | near

    def where_on(array):
        return jnp.where(on, jnp.abs(array), 0)

    hidden_error = where_on(gate_error * up) + where_on(gates * up_error)
    result = {"y": Rows(y, hidden_error @ down_size)}
    if not differentiate:
        return result, {}

    y_bar = y_bar.astype(jnp.float32)
    bar_size = _norms(y_bar)
    bar_error = _SUM_ROUNDING * bar_size[:, None] * down_size
    bar = _product("td,hd->th", y_bar, w_down) + l1_scale * jnp.sign(up)  # if the gate is open
    active_bar = jnp.where(pre_gate > 0, bar, 0)
    up_bar, gate_bar = active_bar * gates, active_bar * up
    dx = _product("th,hd->td", up_bar, w_up) + _product("th,hd->td", gate_bar, w_gate)
    up_bar_error = where_on(bar_error * gates) + where_on(bar * gate_error)
    gate_bar_error = where_on(bar_error * up) + where_on(bar * up_error)
    # A gate that is open instead of closed brings in, or takes out, all of its term; so does the
    # sign of an `up` that may have either, in the L1 term.
    flipped = jnp.where(near, jnp.abs(bar * up), 0)
    sign_error = jnp.where(on & (jnp.abs(up) <= up_error), 2 * jnp.abs(l1_scale), 0)
    up_bar_error += sign_error * gates
    result["dx"] = Rows(
        dx,
        _root_of_squares(up_bar_error, up_size)
        + _root_of_squares(gate_bar_error, gate_size)
        + flipped @ gate_size,
    )
    weights = {
        "dw_gate": (_product("th,td->hd", gate_bar, x), gate_bar_error, size, flipped),
        "dw_up": (_product("th,td->hd", up_bar, x), up_bar_error, size, 0 * flipped),
        "dw_down": (
            _product("th,td->hd", gates * up, y_bar), hidden_error, bar_size, 0 * flipped,
        ),
    }  # fmt: skip
    return result, {
        name: (value, _product("th,t->h", error**2, norms**2), _product("th,t->h", jump, norms))
        for name, (value, error, norms, jump) in weights.items()
    }


def truth_of(layer, y_bar=None, l1_bar: float = 0.0, *, rows: int = 4096) -> dict[str, Rows]:
    """What the layer must give: `y`, and with `y_bar` the gradients of `sum(y y_bar) + l1_bar l1`.

    Args:
      layer: bf16 `(x [M, D], w_gate, w_up, w_down)`.
      y_bar: bf16 `[M, D]`, or None for the forward pass alone.
      l1_bar: derivative of the loss by l1.
      rows: tokens computed at a time.

    Returns:
      `Rows` by name: y, dx, dw_gate, dw_up, dw_down.
    """
    x, *weights = layer
    tokens, by_neuron = [], None
    for first in range(0, len(x), rows):
        part = slice(first, first + rows)
        of_tokens, of_neurons = _piece(
            x[part],
            *weights,
            None if y_bar is None else y_bar[part],
            l1_bar / len(x),
            differentiate=y_bar is not None,
        )
        tokens.append(of_tokens)
        by_neuron = (
            of_neurons if by_neuron is None else jax.tree.map(jnp.add, by_neuron, of_neurons)
        )
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), *tokens)
    for name, (value, squares, jumps) in by_neuron.items():
        joined[name] = Rows(value, jnp.sqrt(squares) + jumps)
    return joined


def relative_row_errors(actual, truth: Rows) -> np.ndarray:
    """Error of every row, less its rounding, over its norm; rows that are 0 must be 0."""
    norms, errors = _norms(truth.value), _norms(actual.astype(jnp.float32) - truth.value)
    # Not jnp.maximum alone: a NaN must stay.
    errors = jnp.where(errors <= truth.rounding, 0, errors - truth.rounding)
    return np.asarray(jnp.where(norms > 0, errors / jnp.maximum(norms, 1e-30), errors))


def worst_row(actual, truth: Rows) -> float:
    """The largest relative row error."""
    return float(relative_row_errors(actual, truth).max())


def check_rows(name: str, actual, truth: Rows, reference_error: float) -> float:
    """The largest relative row error of an output.

    Raises:
      DisagreementError: a row is off by more than twice the worst row of the reference, or
        more than a bf16 rounding where that is larger.
    """
    errors = relative_row_errors(actual, truth)
    if not errors.max() <= max(2 * reference_error, 2**-7):
        raise DisagreementError(
            f"row {errors.argmax()} of {name} is off by {errors.max():.3g}, the worst row of the "
            f"reference by {reference_error:.3g}"
        )
    return float(errors.max())
