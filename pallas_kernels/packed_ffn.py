"""The sparse feed-forward layer from kernels: pack, then touch active neurons only.

Three ways, all exact, chosen on the device:

- A token that has more active neurons in a tile than there are slots (the first tokens of a
  text do) has lost entries. Up to `pool_rows` such tokens are gathered and computed densely;
  the others take the kernels.
- If more tokens lost entries, or if the batch has so many active neurons that reading their
  rows would take longer than the dense matmuls, all of it is computed densely.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.reference import FfnStats
from pallas_kernels.reference import ffn as reference_ffn


class Rows(NamedTuple):
    """Packed gates, as the consumer of a backend reads them.

    Attributes:
      packed: whatever that consumer takes.
      num_active: int32 `[M]`, active neurons of each token.
      overflowed: bool `[M]`, True for tokens that lost entries.
    """

    packed: Any
    num_active: jax.Array
    overflowed: jax.Array


class Kernels(NamedTuple):
    """The kernels of a backend.

    Attributes:
      pack: `(x, w, token_mask) -> (Rows, fired)`, of `relu(x w')`; `fired` is int32 `[H]`, the
        number of unmasked tokens on which a neuron was active.
      up_down: `(packed, x, w_up, w_down) -> (y, norm)`, with the L1 norm of h; both 0 in rows
        that overflowed. Without a gate, x and w_up are None.
    """

    pack: Callable[..., tuple[Rows, jax.Array]]
    up_down: Callable[..., tuple[jax.Array, jax.Array]]


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


def _dense(x, w_gate, w_up, w_down):
    """`(y, norm)` of tokens, computed as the reference does."""
    y, hidden = reference_ffn.dense_forward(x, w_gate, w_up, w_down)
    return y, jnp.sum(jnp.abs(hidden), axis=-1)


def forward(
    x, w_gate, w_up, w_down, token_mask, *, kernels: Kernels, config: FfnConfig
) -> tuple[jax.Array, FfnStats]:
    """The layer, without its gradient; arguments and results of `pallas_kernels.ops.sparse_ffn`."""
    token_shape, width = x.shape[:-1], x.shape[-1]
    x = x.reshape(-1, width)
    mask = None if token_mask is None else token_mask.reshape(-1)
    rows, neurons = x.shape[0], w_up.shape[0]
    rows_packed, fired = kernels.pack(x, w_up if w_gate is None else w_gate, mask)
    packed, num_active, overflowed = rows_packed
    num_overflowed = jnp.sum(overflowed)
    pool_rows = min(config.pool_rows, rows)
    # In f32: the number of pairs may be past 2^31.
    num_pairs = jnp.sum(num_active.astype(jnp.float32))
    is_dense = (num_overflowed > pool_rows) | (num_pairs > config.max_active_share * neurons * rows)

    def by_kernels():
        gated = (x, w_up) if w_gate is not None else (None, None)
        return kernels.up_down(packed, *gated, w_down)

    def by_kernels_and_pool():
        y, norm = by_kernels()
        pooled = jnp.nonzero(overflowed, size=pool_rows, fill_value=rows)[0]
        pool_y, pool_norm = _dense(
            x.at[pooled].get(mode="fill", fill_value=0), w_gate, w_up, w_down
        )
        return (
            y.at[pooled].set(pool_y, mode="drop", unique_indices=True),
            norm.at[pooled].set(pool_norm, mode="drop", unique_indices=True),
        )

    def densely():
        return _dense(x, w_gate, w_up, w_down)

    # One choice for all: the host waits for its number, so it must be known before the
    # consumer runs, and the next operations are sent off while it does.
    way = jnp.where(is_dense, 2, jnp.where(num_overflowed > 0, 1, 0))
    y, norm = lax.switch(way, (by_kernels, by_kernels_and_pool, densely))
    if mask is not None:
        norm, num_active = jnp.where(mask, norm, 0), jnp.where(mask, num_active, 0)
    num_tokens = reference_ffn.count_tokens(token_shape, mask)
    factor = reference_ffn.mean_factor(num_tokens)
    stats = FfnStats(
        l1=jnp.sum(norm) * factor,
        l0=jnp.sum(num_active.astype(jnp.float32)) * factor,
        fired=fired,
        num_tokens=num_tokens,
        num_dense=jnp.where(is_dense, rows, num_overflowed).astype(jnp.int32),
    )
    return y.reshape(*token_shape, width), stats


def make_sparse_ffn(kernels: Kernels) -> Callable:
    """`sparse_ffn` of a backend, see `pallas_kernels.ops`; differentiated, it is the reference."""

    # The kernels have no batch axis: a map over them is a loop.
    @jax.custom_batching.sequential_vmap
    def mapped(x, w_gate, w_up, w_down, token_mask):
        return forward(x, w_gate, w_up, w_down, token_mask, kernels=kernels, config=FfnConfig())

    @jax.custom_vjp
    def sparse_ffn(x, w_gate, w_up, w_down, token_mask):
        return mapped(x, w_gate, w_up, w_down, token_mask)

    # The kernels of the backward pass are not written: training runs on the reference.
    sparse_ffn.defvjp(reference_ffn.forward, reference_ffn.backward)
    return sparse_ffn
