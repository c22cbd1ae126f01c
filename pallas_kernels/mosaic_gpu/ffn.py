"""The sparse feed-forward layer on Hopper: pack, then touch active neurons only.

A token that has more active neurons in a tile than there are slots (the first tokens of a
text do) has lost entries. Such tokens are gathered into a small pool and computed densely;
if they do not fit the pool, the whole batch takes the dense branch. All three ways are
exact, and no choice leaves the device.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic_gpu.consumer import ROW_MULTIPLE, ConsumerConfig, up_down
from pallas_kernels.mosaic_gpu.device import require_hopper
from pallas_kernels.mosaic_gpu.gate import GateConfig, gate_words
from pallas_kernels.mosaic_gpu.words import MAX_NEURONS
from pallas_kernels.reference import FfnStats
from pallas_kernels.reference import ffn as reference_ffn


@dataclasses.dataclass(frozen=True)
class FfnConfig:
    """Configuration of the whole layer.

    Attributes:
      gate: of the packing matmul.
      consumer: of the up and down projections.
      pool_rows: tokens that may overflow before the whole batch is computed densely.
    """

    gate: GateConfig = dataclasses.field(default_factory=GateConfig)
    consumer: ConsumerConfig = dataclasses.field(default_factory=ConsumerConfig)
    pool_rows: int = 256


def check_served(x, w) -> None:
    """Raises NotImplementedError for a dtype or shape that the kernels do not serve."""
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"backend 'mosaic_gpu' serves bfloat16, got {x.dtype}")
    if x.shape[-1] % GateConfig.tile_k:
        raise NotImplementedError(
            f"backend 'mosaic_gpu' needs D to be a multiple of {GateConfig.tile_k}, "
            f"got {x.shape[-1]}"
        )
    if w.shape[0] > MAX_NEURONS:
        raise NotImplementedError(
            f"backend 'mosaic_gpu' serves up to {MAX_NEURONS} neurons, got {w.shape[0]}"
        )
    if x.size == 0:
        raise NotImplementedError("backend 'mosaic_gpu' needs at least one token")


def _pad_columns(array, multiple):
    missing = -array.shape[-1] % multiple
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, missing)]) if missing else array


def _sparse_parts(x, w_gate, w_up, w_down, token_mask, config, interpret):
    """`(y, norm, count, fired)` of `[M, D]` tokens; `count` is negative where a row overflowed."""
    packed_weight = w_up if w_gate is None else w_gate
    words, fired = gate_words(x, packed_weight, token_mask, config=config.gate, interpret=interpret)
    width = x.shape[-1]
    down = _pad_columns(w_down, ROW_MULTIPLE)
    if w_gate is None:
        operands = (None, None, down)
    else:
        operands = (_pad_columns(x, ROW_MULTIPLE), _pad_columns(w_up, ROW_MULTIPLE), down)
    y, norm, count = up_down(words, *operands, config=config.consumer, interpret=interpret)
    return y[:, :width], norm, count, fired


def _dense_rows(x, w_gate, w_up, w_down):
    """`(y, norm)` of tokens, computed as the reference does."""
    y, hidden = reference_ffn.dense_forward(x, w_gate, w_up, w_down)
    return y, jnp.sum(jnp.abs(hidden), axis=-1)


def forward(
    x, w_gate, w_up, w_down, token_mask, *, config: FfnConfig = FfnConfig(), interpret=None
) -> tuple[jax.Array, FfnStats]:
    """The layer, without its gradient; arguments and results of `pallas_kernels.ops.sparse_ffn`."""
    token_shape, width = x.shape[:-1], x.shape[-1]
    x = x.reshape(-1, width)
    mask = None if token_mask is None else token_mask.reshape(-1)
    rows = x.shape[0]
    y, norm, count, fired = _sparse_parts(x, w_gate, w_up, w_down, mask, config, interpret)
    overflowed = count < 0
    num_overflowed = jnp.sum(overflowed)
    pool_rows = min(config.pool_rows, rows)

    def keep(y, norm):
        return y, norm

    def fill_pool(y, norm):
        pooled = jnp.nonzero(overflowed, size=pool_rows, fill_value=rows)[0]
        pool_y, pool_norm = _dense_rows(
            x.at[pooled].get(mode="fill", fill_value=0), w_gate, w_up, w_down
        )
        return (
            y.at[pooled].set(pool_y, mode="drop", unique_indices=True),
            norm.at[pooled].set(pool_norm, mode="drop", unique_indices=True),
        )

    def all_dense(y, norm):
        del y, norm
        return _dense_rows(x, w_gate, w_up, w_down)

    way = (num_overflowed > 0).astype(jnp.int32) + (num_overflowed > pool_rows)
    y, norm = lax.switch(way, (keep, fill_pool, all_dense), y, norm)

    weight = 1.0 if mask is None else mask
    num_tokens = reference_ffn.count_tokens(token_shape, mask)
    factor = reference_ffn.mean_factor(num_tokens)
    stats = FfnStats(
        l1=jnp.sum(jnp.where(weight, norm, 0)) * factor,
        l0=jnp.sum(jnp.where(weight, jnp.abs(count), 0).astype(jnp.float32)) * factor,
        fired=fired,
        num_tokens=num_tokens,
    )
    return y.reshape(*token_shape, width), stats


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _sparse_ffn(x, w_gate, w_up, w_down, token_mask, config):
    return forward(x, w_gate, w_up, w_down, token_mask, config=config)


def _forward_for_gradient(x, w_gate, w_up, w_down, token_mask, config):
    # The kernels of the backward pass are not written: training runs on the reference.
    del config
    return reference_ffn.forward(x, w_gate, w_up, w_down, token_mask)


def _backward(config, residuals, cotangents):
    del config
    return reference_ffn.backward(residuals, cotangents)


_sparse_ffn.defvjp(_forward_for_gradient, _backward)


def sparse_ffn(x, w_gate, w_up, w_down, token_mask):
    """See `pallas_kernels.ops.sparse_ffn`; the gradient is that of the reference backend."""
    require_hopper()
    check_served(x, w_up)
    return _sparse_ffn(x, w_gate, w_up, w_down, token_mask, FfnConfig())
