"""The sparse feed-forward layer from kernels: pack, then touch active neurons only.

Neurons of the dense band (see `plan`) are computed by dense matmuls, and the kernels add those
of the sparse band to their result. There are three ways to do the latter, all exact, chosen on
the device, for the forward and the backward pass alike:

- A token that has more active neurons in a tile than there are slots (the first tokens of a
  text do) has lost entries. Up to `pool_rows` such tokens are gathered and computed densely;
  the others take the kernels.
- If more tokens lost entries, or if the batch has so many active neurons that reading their
  rows would take longer than the dense matmuls, all of it is computed densely.

Between the bands `y` and `dx` are rounded to bf16 once more.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.reference import FfnStats
from pallas_kernels.reference import ffn as reference_ffn

# Kernels only; some tokens densely; all of them densely.
_SPARSE, _POOL, _DENSE = range(3)


class Kernels(NamedTuple):
    """The kernels of a backend.

    Attributes:
      pack: `(x, w, token_mask) -> (words, fired)`, of `relu(x w')`; `fired` is int32 `[H]`, the
        number of unmasked tokens on which a neuron was active. See `words`.
      make_lists: `(words, lengths, capacity) -> lists`, whatever the others read. `lengths`,
        int32 `[M]`, is the number of active neurons of a token, or 0 to leave it out.
      up_down: `(lists, x, w_up, w_down, start) -> (y, norm)`, with the L1 norm of h. y is added
        to `start`, `[M, D]`, or to 0 if it is None; rows that were left out are it, and have norm
        0. Without a gate, x and w_up are None.
      gradients: `(lists, l1_scale, x, y_bar, w_gate, w_up, w_down, dx_start, dw_start) -> (dx,
        dw_gate, dw_up, dw_down)`. `l1_scale` is that of the reference. dx is added to `dx_start`,
        `[M, D]`, and weight gradients to `dw_start`, f32 by weight; or to 0 if it is None. Or
        None: then a differentiated layer is the reference.
    """

    pack: Callable[..., tuple[jax.Array, jax.Array]]
    make_lists: Callable[..., Any]
    up_down: Callable[..., tuple[jax.Array, jax.Array]]
    gradients: Callable[..., tuple] | None = None


@dataclasses.dataclass(frozen=True)
class FfnConfig:
    """When to be dense.

    Attributes:
      pool_rows: tokens that may overflow before the whole batch is computed densely.
      max_active_share: mean share of the neurons that may be active before the whole batch is
        computed densely. A neuron's two rows cost about as much as 1 % of the dense
        layer's two matmuls (H200, D=2048, H=5632, M=32768).
    """

    pool_rows: int = 256
    max_active_share: float = 0.01


class Residuals(NamedTuple):
    """What the backward pass needs, besides the arguments of the layer.

    Attributes:
      dense: gate, or None, and up activations of the dense band, if there is one.
      lists: the active neurons of the sparse band and their gates.
      overflowed: bool `[M]`, tokens that lost entries.
      way: int32, how the sparse band was computed.
    """

    dense: tuple
    lists: Any
    overflowed: jax.Array
    way: jax.Array


def list_capacity(rows: int, neurons: int, config: FfnConfig) -> int:
    """Entries that lists have room for."""
    return max(int(rows * neurons * config.max_active_share), 1)


def _pooled(overflowed, pool_rows: int):
    """Numbers of the tokens in the pool; places that are left over lie past the last token."""
    return jnp.nonzero(overflowed, size=pool_rows, fill_value=len(overflowed))[0]


def _take(array, pooled):
    return array.at[pooled].get(mode="fill", fill_value=0)


def _put(array, pooled, values):
    return array.at[pooled].set(values.astype(array.dtype), mode="drop")


def _bands(weights, dense_band: int):
    """The weights of the dense and of the sparse band."""

    def of(rows):
        return tuple(None if w is None else w[rows] for w in weights)

    return of(slice(0, dense_band)), of(slice(dense_band, None))


def _dense(x, weights, start):
    """`(y, norm)` of tokens, computed as the reference does, and added to `start` or to 0."""
    y, hidden = reference_ffn.dense_forward(x, *weights)
    y = y if start is None else y + start.astype(y.dtype)
    return y.astype(x.dtype), jnp.sum(jnp.abs(hidden), axis=-1)


def forward(
    x, w_gate, w_up, w_down, token_mask, *, kernels: Kernels, config: FfnConfig, dense_band: int
) -> tuple[tuple[jax.Array, FfnStats], Residuals]:
    """The layer; arguments and first result of `pallas_kernels.ops.sparse_ffn`."""
    token_shape, width = x.shape[:-1], x.shape[-1]
    x = x.reshape(-1, width)
    mask = None if token_mask is None else token_mask.reshape(-1)
    dense, sparse = _bands((w_gate, w_up, w_down), dense_band)
    start, dense_stats, activations = None, None, ()
    if dense_band:
        (start, dense_stats), residuals = reference_ffn.forward(x, *dense, mask)
        activations = residuals[-2:]
    (y, stats), residuals = _sparse_forward(x, sparse, mask, start, kernels, config)
    if dense_stats is not None:
        stats = stats._replace(
            l1=dense_stats.l1 + stats.l1,
            l0=dense_stats.l0 + stats.l0,
            fired=jnp.concatenate([dense_stats.fired, stats.fired]),
        )
    return (y.reshape(*token_shape, width), stats), Residuals(activations, *residuals)


def _sparse_forward(x, weights, mask, start, kernels, config):
    """y, added to `start`, and statistics of the sparse band; residuals without `dense`."""
    w_gate, w_up, w_down = weights
    rows, neurons = x.shape[0], w_up.shape[0]
    words, fired = kernels.pack(x, w_up if w_gate is None else w_gate, mask)
    counts = words[:, :, 0]
    num_active = jnp.sum(counts, axis=1)
    overflowed = jnp.any(counts > words.shape[2] - 1, axis=1)
    num_overflowed = jnp.sum(overflowed)
    pool_rows = min(config.pool_rows, rows)
    capacity = list_capacity(rows, neurons, config)
    # In f32, as the number of pairs may be past 2^31; less what its rounding may hide.
    num_pairs = jnp.sum(num_active.astype(jnp.float32))
    is_dense = (num_overflowed > pool_rows) | (num_pairs > capacity * (1 - 2**-16))
    # One choice for all: the host waits for its number, so it must be known before the
    # consumer runs, and the next operations are sent off while it does.
    way = jnp.where(is_dense, _DENSE, jnp.where(num_overflowed > 0, _POOL, _SPARSE))
    lengths = jnp.where(overflowed | is_dense, 0, num_active)
    lists = kernels.make_lists(words, lengths, capacity)

    def by_kernels():
        gated = (x, w_up) if w_gate is not None else (None, None)
        return kernels.up_down(lists, *gated, w_down, start)

    def by_kernels_and_pool():
        y, norm = by_kernels()
        pooled = _pooled(overflowed, pool_rows)
        pool_start = None if start is None else _take(start, pooled)
        pool_y, pool_norm = _dense(_take(x, pooled), weights, pool_start)
        return _put(y, pooled, pool_y), _put(norm, pooled, pool_norm)

    def densely():
        return _dense(x, weights, start)

    y, norm = lax.switch(way, (by_kernels, by_kernels_and_pool, densely))
    if mask is not None:
        norm, num_active = jnp.where(mask, norm, 0), jnp.where(mask, num_active, 0)
    num_tokens = reference_ffn.count_tokens(x.shape[:1], mask)
    factor = reference_ffn.mean_factor(num_tokens)
    stats = FfnStats(
        l1=jnp.sum(norm) * factor,
        l0=jnp.sum(num_active.astype(jnp.float32)) * factor,
        fired=fired,
        num_tokens=num_tokens,
        num_dense=jnp.where(is_dense, rows, num_overflowed).astype(jnp.int32),
    )
    return (y, stats), (lists, overflowed, way)


def backward(
    x,
    w_gate,
    w_up,
    w_down,
    token_mask,
    residuals: Residuals,
    cotangents,
    *,
    kernels: Kernels,
    config: FfnConfig,
    dense_band: int,
) -> tuple:
    """Gradients of x and the weights; the first five arguments are those of `forward`."""
    y_bar, stats_bar = cotangents
    shape, width = x.shape, x.shape[-1]
    x, y_bar = x.reshape(-1, width), y_bar.reshape(-1, width)
    mask = None if token_mask is None else token_mask.reshape(-1)
    dense, sparse = _bands((w_gate, w_up, w_down), dense_band)
    tokens = (x, y_bar, reference_ffn.l1_scales(stats_bar.l1, x.shape[:1], mask))
    start = None
    if dense_band:
        results = reference_ffn.gradients(x, *dense, *residuals.dense, *tokens[1:])
        start, *dense_dw = jax.tree.map(lambda result: result.astype(x.dtype), results)
    dx, *dw = _sparse_backward(tokens, sparse, residuals, start, kernels, config)
    if dense_band:
        dw = [
            None if of_dense is None else jnp.concatenate([of_dense, of_sparse])
            for of_dense, of_sparse in zip(dense_dw, dw, strict=True)
        ]
    return dx.reshape(shape), *dw


def _sparse_backward(tokens, weights, residuals, start, kernels, config):
    """dx, added to `start`, and the gradients of the weights of the sparse band.

    `tokens` are x, y_bar and l1_scale.
    """
    x, y_bar, l1_scale = tokens
    _, lists, overflowed, way = residuals

    def of_tokens(tokens, start):
        """As the reference does; f32."""
        x, y_bar, l1_scale = tokens
        activations = reference_ffn.activations(x, *weights[:2])
        dx, *dw = reference_ffn.gradients(x, *weights, *activations, y_bar, l1_scale)
        return dx if start is None else dx + start.astype(dx.dtype), *dw

    def by_kernels(dw_start=None):
        return kernels.gradients(lists, l1_scale, x, y_bar, *weights, start, dw_start)

    def by_kernels_and_pool():
        pooled = _pooled(overflowed, min(config.pool_rows, len(x)))
        pool_start = None if start is None else _take(start, pooled)
        pool_tokens = tuple(_take(array, pooled) for array in tokens)
        pool_dx, *dw_start = of_tokens(pool_tokens, pool_start)
        dx, *dw = by_kernels(dw_start)
        return _put(dx, pooled, pool_dx), *dw

    def densely():
        return jax.tree.map(lambda result: result.astype(x.dtype), of_tokens(tokens, start))

    return lax.switch(way, (by_kernels, by_kernels_and_pool, densely))


def make_sparse_ffn(kernels: Kernels, config: FfnConfig = FfnConfig()) -> Callable:
    """`sparse_ffn` of a backend, see `pallas_kernels.ops`."""

    @functools.cache
    def with_band(dense_band):
        return _make_with_band({"kernels": kernels, "config": config, "dense_band": dense_band})

    def sparse_ffn(x, w_gate, w_up, w_down, token_mask, *, dense_band=0):
        if dense_band == len(w_up):
            return reference_ffn.sparse_ffn(x, w_gate, w_up, w_down, token_mask)
        return with_band(dense_band)(x, w_gate, w_up, w_down, token_mask)

    return sparse_ffn


def _make_with_band(settings) -> Callable:
    # The kernels have no batch axis: a map over them is a loop.
    @jax.custom_batching.sequential_vmap
    def mapped_forward(*arguments):
        return forward(*arguments, **settings)

    @jax.custom_batching.sequential_vmap
    def mapped_backward(*arguments):
        return backward(*arguments, **settings)

    @jax.custom_vjp
    def sparse_ffn(x, w_gate, w_up, w_down, token_mask):
        return mapped_forward(x, w_gate, w_up, w_down, token_mask)[0]

    def save(*arguments):
        result, residuals = mapped_forward(*arguments)
        # Here, as a policy of jax.checkpoint does not look into a mapped function.
        return result, (arguments, checkpoint_name(residuals, "ffn_lists"))

    def differentiate(saved, cotangents):
        arguments, residuals = saved
        return *mapped_backward(*arguments, residuals, cotangents), None

    if settings["kernels"].gradients is None:
        sparse_ffn.defvjp(reference_ffn.forward, reference_ffn.backward)
    else:
        sparse_ffn.defvjp(save, differentiate)
    return sparse_ffn
