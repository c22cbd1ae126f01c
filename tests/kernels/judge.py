"""Runs a feed-forward layer with its gradients, and judges its rows."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.kernels.truth import row_errors

GRADIENTS = ("dx", "dw_gate", "dw_up", "dw_down")


def run(function, inputs):
    """(y, stats or l1, gradients by name) of `function(x, w_gate, w_up, w_down, mask)`."""

    @jax.jit
    def outputs_and_gradients(x, w_gate, w_up, w_down, token_mask, y_bar):
        arguments = (x, w_gate, w_up, w_down)
        (y, other), vjp = jax.vjp(lambda *a: function(*a, token_mask), *arguments)
        return y, other, vjp((y_bar, _cotangent(other, inputs.l1_bar)))

    y, other, gradients = outputs_and_gradients(
        inputs.x, inputs.w_gate, inputs.w_up, inputs.w_down, inputs.token_mask, inputs.y_bar
    )
    named = zip(GRADIENTS, gradients, strict=True)
    return y, other, {name: gradient for name, gradient in named if gradient is not None}


def _cotangent(stats_or_l1, l1_bar):
    """`l1_bar` for l1 and nothing for the other statistics."""
    if not hasattr(stats_or_l1, "_replace"):
        return jnp.float32(l1_bar)
    return stats_or_l1._replace(
        l1=jnp.float32(l1_bar),
        l0=jnp.float32(0),
        fired=np.zeros(stats_or_l1.fired.shape, jax.dtypes.float0),
        num_tokens=np.zeros((), jax.dtypes.float0),
        num_dense=np.zeros((), jax.dtypes.float0),
    )


def assert_rows_close(name, actual, truth, naive, contraction, rows=slice(None)):
    """Every row's error is at most twice the worst row error of the naive layer.

    The naive layer can be exact by luck where there are few rows. So the limit is never
    under one rounding of the result, nor under the random walk of f32 roundings that a
    sum of `contraction` terms makes.
    """
    rounding = float(jnp.finfo(actual.dtype).eps)
    walk = np.sqrt(contraction) * 2**-23
    limit = max(2 * row_errors(naive, truth)[rows].max(initial=0.0), rounding, walk)
    errors = row_errors(actual, truth)[rows]
    assert errors.max(initial=0.0) <= limit, (
        f"{name}: row {errors.argmax()} is off by {errors.max():.3g}, limit {limit:.3g}"
    )
