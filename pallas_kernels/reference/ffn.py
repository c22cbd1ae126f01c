"""Reference of the sparse feed-forward layer, forward and backward.

With `S` the set of (token, neuron) pairs whose gate is positive or NaN:

    g = relu(x Wg'),  u = x Wu',  h = g * u on S, 0 elsewhere,  y = h Wd
    l1 = mean over unmasked tokens of sum_j |h|
    l0 = mean over unmasked tokens of |S_t|

    hbar = ybar Wd' + (l1bar / num_tokens) sign(h)  on S, 0 elsewhere
    ubar = hbar * g,  gbar = hbar * u
    dx = ubar Wu + gbar Wg,  dWu = ubar' x,  dWg = gbar' x,  dWd = h' ybar

and without a gate `h = relu(x Wu')`, `ubar = hbar`, `dx = ubar Wu`.

Rounding: `g` and `u` are f32 sums rounded once to the dtype of `x`; `h` and `hbar`
(with the L1 term, which would vanish in bf16) are f32 and rounded once, where a
matmul reads them. A neuron is active where the rounded gate is positive or NaN.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.reference.matmuls import from_hidden, over_tokens, to_hidden


class FfnStats(NamedTuple):
    """Activation statistics of one feed-forward layer over its unmasked tokens.

    Attributes:
      l1: f32 scalar, mean over tokens of the sum of |h|. Differentiable.
      l0: f32 scalar, mean over tokens of the number of active neurons.
      fired: int32 `[H]`, number of tokens on which a neuron was active.
      num_tokens: int32 scalar, number of unmasked tokens. All means are 0 if it is 0.
      num_dense: int32 scalar, number of tokens, masked ones included, that a sparse backend
        computed densely because they, or their whole batch, did not fit its format; 0 in
        the reference. The result is the same; it tells why a layer is slow.
    """

    l1: jax.Array
    l0: jax.Array
    fired: jax.Array
    num_tokens: jax.Array
    num_dense: jax.Array


def _hidden(gate, up):
    """f32 `h` from the rounded activations; `gate` is None in the non-gated layer."""
    if gate is None:
        return up.astype(jnp.float32)
    # The product is taken on the support only: an infinite `up` under a closed gate
    # must give 0, not NaN.
    return jnp.where(gate != 0, gate.astype(jnp.float32) * up.astype(jnp.float32), 0)


def count_tokens(token_shape, token_mask):
    """Number of unmasked tokens, int32."""
    if token_mask is None:
        return jnp.int32(math.prod(token_shape))
    return jnp.sum(token_mask, dtype=jnp.int32)


def mean_factor(num_tokens):
    """What a sum over unmasked tokens is multiplied by to give their mean."""
    return 1.0 / jnp.maximum(num_tokens, 1).astype(jnp.float32)


def _stats(hidden, active, token_mask) -> FfnStats:
    token_axes = tuple(range(hidden.ndim - 1))
    magnitude = jnp.abs(hidden)
    if token_mask is not None:
        active = active & token_mask[..., None]
        magnitude = jnp.where(token_mask[..., None], magnitude, 0)
    num_tokens = count_tokens(hidden.shape[:-1], token_mask)
    fired = jnp.sum(active, axis=token_axes, dtype=jnp.int32)
    factor = mean_factor(num_tokens)
    # Both totals go through per-neuron sums: one pass over the activations gives
    # all statistics, and f32 sums of at most `tokens` terms stay accurate.
    return FfnStats(
        l1=jnp.sum(jnp.sum(magnitude, axis=token_axes)) * factor,
        l0=jnp.sum(fired.astype(jnp.float32)) * factor,
        fired=fired,
        num_tokens=num_tokens,
        # 0, that differs over devices as the other counts do, for `jax.shard_map`.
        num_dense=fired[0] * 0,
    )


def activations(x, w_gate, w_up):
    """The rounded gate, None in the non-gated layer, and up activations."""
    if w_gate is None:
        gate, up = None, jax.nn.relu(to_hidden(x, w_up)).astype(x.dtype)
    else:
        gate = checkpoint_name(jax.nn.relu(to_hidden(x, w_gate)).astype(x.dtype), "ffn_gate")
        up = to_hidden(x, w_up).astype(x.dtype)
    return gate, checkpoint_name(up, "ffn_up")


def dense_forward(x, w_gate, w_up, w_down):
    """`y` and `h`, both f32, without statistics."""
    hidden = _hidden(*activations(x, w_gate, w_up))
    return from_hidden(hidden.astype(x.dtype), w_down), hidden


def forward(x, w_gate, w_up, w_down, token_mask):
    """`(y, stats)`, and the residuals of `backward`."""
    gate, up = activations(x, w_gate, w_up)
    hidden = _hidden(gate, up)
    active = (up if gate is None else gate) != 0  # True for NaN
    y = from_hidden(hidden.astype(x.dtype), w_down).astype(x.dtype)
    residuals = (x, w_gate, w_up, w_down, token_mask, gate, up)
    return (y, _stats(hidden, active, token_mask)), residuals


def l1_scales(l1_bar, token_shape, token_mask):
    """Derivative of the loss by the L1 norm of h of every token, f32 `token_shape`."""
    scale = l1_bar * mean_factor(count_tokens(token_shape, token_mask))
    mask = True if token_mask is None else token_mask
    return jnp.broadcast_to(jnp.where(mask, scale, 0), token_shape)


def gradients(x, w_gate, w_up, w_down, gate, up, y_bar, l1_scale):
    """f32 gradients of x and the weights.

    Args:
      x, w_gate, w_up, w_down: of the layer.
      gate, up: the rounded activations; gate is None in the non-gated layer.
      y_bar: cotangent of y.
      l1_scale: see `l1_scales`.
    """
    hidden = _hidden(gate, up)
    active = (up if gate is None else gate) != 0
    # Where the scale is 0 the sign of a NaN must not matter.
    scale = l1_scale[..., None]
    l1_term = jnp.where(scale != 0, scale * jnp.sign(hidden), 0)
    hidden_bar = jnp.where(active, to_hidden(y_bar, w_down) + l1_term, 0)

    dw_down = over_tokens(hidden.astype(x.dtype), y_bar)
    if gate is None:
        up_bar = hidden_bar.astype(x.dtype)
        dx = from_hidden(up_bar, w_up)
        dw_gate = None
    else:
        up_bar = (hidden_bar * gate.astype(jnp.float32)).astype(x.dtype)
        # Off the support hidden_bar is 0, but 0 times an infinite `up` is not.
        gate_bar = jnp.where(active, hidden_bar * up.astype(jnp.float32), 0).astype(x.dtype)
        dx = from_hidden(up_bar, w_up) + from_hidden(gate_bar, w_gate)
        dw_gate = over_tokens(gate_bar, x)
    return dx, dw_gate, over_tokens(up_bar, x), dw_down


def backward(residuals, cotangents):
    """Gradients of the five arguments of `forward`; none of the mask."""
    x, w_gate, w_up, w_down, token_mask, gate, up = residuals
    y_bar, stats_bar = cotangents
    scale = l1_scales(stats_bar.l1, x.shape[:-1], token_mask)
    results = gradients(x, w_gate, w_up, w_down, gate, up, y_bar, scale)
    return *jax.tree.map(lambda result: result.astype(x.dtype), results), None


@jax.custom_vjp
def _sparse_ffn(x, w_gate, w_up, w_down, token_mask):
    return forward(x, w_gate, w_up, w_down, token_mask)[0]


_sparse_ffn.defvjp(forward, backward)


def sparse_ffn(x, w_gate, w_up, w_down, token_mask, *, dense_band=0):
    """See `pallas_kernels.ops.sparse_ffn`; here all neurons are computed densely anyway."""
    del dense_band
    return _sparse_ffn(x, w_gate, w_up, w_down, token_mask)
