"""The sparse feed-forward layer on Hopper: pack, then touch active neurons only.

Three ways, all exact, chosen on the device:

- A token that has more active neurons in a tile than there are slots (the first tokens of a
  text do) has lost entries. Up to `pool_rows` such tokens are gathered and computed densely;
  the others take the kernels.
- If more tokens lost entries, or if the batch has so many active neurons that reading their
  rows would take longer than the dense matmuls, all of it is computed densely.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic_gpu.consumer import (
    ROW_MULTIPLE,
    ConsumerConfig,
    default_config,
    up_down,
)
from pallas_kernels.mosaic_gpu.device import require_hopper
from pallas_kernels.mosaic_gpu.gate import GateConfig, gate_words
from pallas_kernels.mosaic_gpu.shapes import check_weights, pad_columns
from pallas_kernels.reference import FfnStats
from pallas_kernels.reference import ffn as reference_ffn


@dataclasses.dataclass(frozen=True)
class FfnConfig:
    """Configuration of the whole layer.

    Attributes:
      gate: of the packing matmul.
      consumer: of the up and down projections; None for its default.
      pool_rows: tokens that may overflow before the whole batch is computed densely.
      max_active_share: mean share of the neurons that may be active before the whole batch is
        computed densely. A neuron's two rows cost about as much as 1 % of the dense
        layer's two matmuls (H200, D=2048, H=5632, M=32768).
    """

    gate: GateConfig = dataclasses.field(default_factory=GateConfig)
    consumer: ConsumerConfig | None = None
    pool_rows: int = 256
    max_active_share: float = 0.01


def _dense(x, w_gate, w_up, w_down):
    """`(y, norm)` of tokens, computed as the reference does."""
    y, hidden = reference_ffn.dense_forward(x, w_gate, w_up, w_down)
    return y, jnp.sum(jnp.abs(hidden), axis=-1)


def _sparse(words, x, w_gate, w_up, w_down, config, interpret):
    """`(y, norm)` of tokens that lost no entries; 0 for the others."""
    width = x.shape[-1]
    down = pad_columns(w_down, ROW_MULTIPLE)
    operands = (None, None, down)
    if w_gate is not None:
        x, w_up = (pad_columns(array, ROW_MULTIPLE) for array in (x, w_up))
        operands = (x, w_up, down)
    consumer_config = config.consumer or default_config(
        down.shape[1], words.shape[1], config.gate.slots
    )
    y, norm = up_down(words, *operands, config=consumer_config, interpret=interpret)
    return y[:, :width], norm


def forward(
    x, w_gate, w_up, w_down, token_mask, *, config: FfnConfig, interpret=None
) -> tuple[jax.Array, FfnStats]:
    """The layer, without its gradient; arguments and results of `pallas_kernels.ops.sparse_ffn`."""
    token_shape, width = x.shape[:-1], x.shape[-1]
    x = x.reshape(-1, width)
    mask = None if token_mask is None else token_mask.reshape(-1)
    rows, neurons = x.shape[0], w_up.shape[0]
    packed_weight = w_up if w_gate is None else w_gate
    words, fired = gate_words(x, packed_weight, mask, config=config.gate, interpret=interpret)

    counts = words[:, :, 0]
    overflowed = jnp.any(counts > config.gate.slots, axis=1)
    num_active = jnp.sum(counts, axis=1)
    num_overflowed = jnp.sum(overflowed)
    pool_rows = min(config.pool_rows, rows)
    # In f32: the number of pairs may be past 2^31.
    num_pairs = jnp.sum(num_active.astype(jnp.float32))
    is_dense = (num_overflowed > pool_rows) | (num_pairs > config.max_active_share * neurons * rows)

    def fill_pool(y, norm):
        pooled = jnp.nonzero(overflowed, size=pool_rows, fill_value=rows)[0]
        pool_y, pool_norm = _dense(
            x.at[pooled].get(mode="fill", fill_value=0), w_gate, w_up, w_down
        )
        return (
            y.at[pooled].set(pool_y, mode="drop", unique_indices=True),
            norm.at[pooled].set(pool_norm, mode="drop", unique_indices=True),
        )

    def by_kernels():
        y, norm = _sparse(words, x, w_gate, w_up, w_down, config, interpret)
        return lax.cond(num_overflowed > 0, fill_pool, lambda *results: results, y, norm)

    def densely():
        return _dense(x, w_gate, w_up, w_down)

    y, norm = lax.cond(is_dense, densely, by_kernels)
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


# The kernels have no batch axis: a map over them is a loop.
@jax.custom_batching.sequential_vmap
def _forward(x, w_gate, w_up, w_down, token_mask):
    return forward(x, w_gate, w_up, w_down, token_mask, config=FfnConfig())


@jax.custom_vjp
def sparse_ffn(x, w_gate, w_up, w_down, token_mask):
    """See `pallas_kernels.ops.sparse_ffn`; where it is differentiated it is the reference."""
    return _forward(x, w_gate, w_up, w_down, token_mask)


# The kernels of the backward pass are not written: training runs on the reference.
sparse_ffn.defvjp(reference_ffn.forward, reference_ffn.backward)


def check_sparse_ffn(x, w_gate, w_up, w_down, token_mask) -> None:
    """Raises NotImplementedError if these kernels cannot serve the arguments here."""
    del w_gate, w_down, token_mask
    require_hopper()
    check_weights(x, w_up)
