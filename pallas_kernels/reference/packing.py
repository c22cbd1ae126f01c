"""Reference of the TwELL operations: `pack`, `unpack` and the two packed matmuls."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.reference.matmuls import from_hidden, over_tokens, to_hidden
from pallas_kernels.twell import Twell


def pack(dense, *, tile, slots) -> Twell:
    """See `pallas_kernels.ops.pack`."""
    return _pack(dense, tile, slots)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _pack(dense, tile, slots) -> Twell:
    num_columns = dense.shape[-1]
    num_tiles = -(-num_columns // tile)
    padding = [(0, 0)] * (dense.ndim - 1) + [(0, num_tiles * tile - num_columns)]
    tiles = jnp.pad(dense, padding).reshape(*dense.shape[:-1], num_tiles, tile)
    active = tiles != 0  # True for NaN
    count = jnp.sum(active, axis=-1, dtype=jnp.int32)
    # A stable sort by "is zero" brings the non-zeros to the front in column order.
    column = jnp.argsort(~active, axis=-1, stable=True)[..., :slots].astype(jnp.int32)
    used = jnp.arange(slots) < count[..., None]
    first_column = tile * jnp.arange(num_tiles, dtype=jnp.int32)[:, None]
    return Twell(
        count=count,
        index=jnp.where(used, first_column + column, num_columns),
        value=jnp.where(used, jnp.take_along_axis(tiles, column, axis=-1), 0),
        num_columns=num_columns,
        tile=tile,
    )


def _pack_forward(dense, tile, slots):
    twell = _pack(dense, tile, slots)
    return twell, twell


def _pack_backward(tile, slots, twell, twell_bar):
    del tile, slots
    return (_dense_cotangent(twell, twell_bar),)


_pack.defvjp(_pack_forward, _pack_backward)


@jax.custom_vjp
def unpack(twell: Twell):
    """See `pallas_kernels.ops.unpack`."""
    dense = _scatter(twell, twell.value)
    return jnp.where(twell.overflowed[..., None], jnp.nan, dense)


def _unpack_forward(twell):
    return unpack(twell), twell


def _unpack_backward(twell, dense_bar):
    return (_twell_cotangent(twell, dense_bar),)


unpack.defvjp(_unpack_forward, _unpack_backward)


def _scatter(twell: Twell, value):
    """Lays `value`, shaped like the slots, out as `[..., num_columns]`; unused slots drop."""
    leading = twell.shape[:-1]
    num_rows = math.prod(leading)
    num_entries = twell.num_tiles * twell.slots
    row = jnp.arange(num_rows)[:, None]
    dense = jnp.zeros((num_rows, twell.num_columns), value.dtype)
    dense = dense.at[row, twell.index.reshape(num_rows, num_entries)].set(
        value.reshape(num_rows, num_entries), mode="drop"
    )
    return dense.reshape(*leading, twell.num_columns)


def _dense_cotangent(twell: Twell, twell_bar: Twell):
    """Cotangent of the packed matrix; entries lost to overflow have none, so its row is NaN."""
    return jnp.where(twell.overflowed[..., None], jnp.nan, _scatter(twell, twell_bar.value))


def _twell_cotangent(twell: Twell, dense_bar) -> Twell:
    """Cotangent of `twell` from that of its matrix `[..., num_columns]`; NaN where lost."""
    dense_bar = jnp.where(twell.overflowed[..., None], jnp.nan, dense_bar)
    flat_index = twell.index.reshape(*twell.shape[:-1], twell.num_tiles * twell.slots)
    value_bar = jnp.take_along_axis(dense_bar, flat_index, axis=-1, mode="fill", fill_value=0)

    def no_gradient(array):
        return np.zeros(array.shape, jax.dtypes.float0)

    return Twell(
        count=no_gradient(twell.count),
        index=no_gradient(twell.index),
        value=value_bar.reshape(twell.value.shape).astype(twell.dtype),
        num_columns=twell.num_columns,
        tile=twell.tile,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def matmul_pack(x, w, tile, slots) -> Twell:
    """See `pallas_kernels.ops.matmul_pack`."""
    return pack(jax.nn.relu(to_hidden(x, w)).astype(x.dtype), tile=tile, slots=slots)


def _matmul_pack_forward(x, w, tile, slots):
    twell = matmul_pack(x, w, tile, slots)
    return twell, (x, w, twell)


def matmul_pack_backward(tile, slots, residuals, twell_bar):
    """Gradients of x and w; `residuals` are x, w and the result."""
    del tile, slots
    x, w, twell = residuals
    product_bar = _dense_cotangent(twell, twell_bar)
    dx = from_hidden(product_bar, w)
    return dx.astype(x.dtype), over_tokens(product_bar, x).astype(w.dtype)


matmul_pack.defvjp(_matmul_pack_forward, matmul_pack_backward)


@jax.custom_vjp
def twell_matmul(twell: Twell, w):
    """See `pallas_kernels.ops.twell_matmul`."""
    return from_hidden(unpack(twell), w).astype(w.dtype)


def _twell_matmul_forward(twell, w):
    return twell_matmul(twell, w), (twell, w)


def twell_matmul_backward(residuals, y_bar):
    """Gradients of the arguments of `twell_matmul`, which are the residuals."""
    twell, w = residuals
    dw = over_tokens(unpack(twell), y_bar)
    return _twell_cotangent(twell, to_hidden(y_bar, w)), dw.astype(w.dtype)


twell_matmul.defvjp(_twell_matmul_forward, twell_matmul_backward)
