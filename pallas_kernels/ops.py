"""The public operations: they check their arguments and hand them to a backend.

All weights are neuron-major `[H, D]`: row j belongs to hidden neuron j, so `w_down`
is the transpose of the usual down projection.

Offered dtypes are float32 and bfloat16, the same one for all operands of a call.
Products are accumulated in f32; for float32 operands that is subject to
`jax.default_matmul_precision`, as every matmul in JAX.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, reference
from pallas_kernels.plan import FfnPlan
from pallas_kernels.reference import FfnStats
from pallas_kernels.twell import Twell

_DTYPES = (jnp.float32, jnp.bfloat16)


def sparse_ffn(
    x,
    w_gate,
    w_up,
    w_down,
    *,
    token_mask=None,
    backend: str = "auto",
    plan: FfnPlan = FfnPlan(),  # noqa: B008
) -> tuple[jax.Array, FfnStats]:
    """Feed-forward layer `(relu(x Wg') * (x Wu')) Wd` that profits from zero gates.

    Equal to the dense layer at every density; see `pallas_kernels.reference.ffn` for
    the exact formulas, forward and backward. Gradients flow through `y` and through
    `stats.l1`, to `x` and every weight; the L1 gradient is added in f32.

    `y` is computed for masked tokens too: the mask concerns the statistics, and with
    them the gradient of `l1`.

    A NaN or inf in one token stays in `y` and `dx` of that token, in `l1`, and in the
    weight gradients of the neurons that are active on it. (The weight gradients of other
    neurons are finite, but for the columns where x itself is not: there a backend may
    give 0 times inf.) Weights must be finite: a backend may or may not show what is in
    the rows of neurons that are not active.

    Args:
      x: `[..., D]` tokens, float32 or bfloat16.
      w_gate: `[H, D]` gate weights, or None for the non-gated layer `relu(x Wu') Wd`.
      w_up: `[H, D]` up weights.
      w_down: `[H, D]` down weights.
      token_mask: bool `[...]`, True for the tokens that count in the statistics;
        None counts all of them.
      backend: one of `pallas_kernels.BACKENDS`.
      plan: which neurons are computed how; by default all of them by the sparse kernels.

    Returns:
      `y`, `[..., D]` in the dtype of x, and `FfnStats`.

    Raises:
      ValueError: an argument has a wrong shape or dtype.
      NotImplementedError: the named backend cannot serve these shapes or dtypes.
    """
    x, w_up, w_down = jnp.asarray(x), jnp.asarray(w_up), jnp.asarray(w_down)
    w_gate = None if w_gate is None else jnp.asarray(w_gate)
    token_mask = None if token_mask is None else jnp.asarray(token_mask)
    check_sparse_ffn(x, w_gate, w_up, w_down, token_mask)
    plan.check(len(w_up))
    weights = (w_gate, w_up, w_down)
    if plan.silent_band:
        weights = tuple(None if w is None else w[: len(w_up) - plan.silent_band] for w in weights)
    y, stats = dispatch.call(
        "sparse_ffn", backend, x, *weights, token_mask, dense_band=plan.dense_band
    )
    return y, stats._replace(fired=jnp.pad(stats.fired, (0, plan.silent_band)))


def check_sparse_ffn(x, w_gate, w_up, w_down, token_mask) -> None:
    """Raises ValueError naming the first argument of `sparse_ffn` that has a wrong shape or dtype.

    Takes arrays; a caller that splits them over devices checks the whole ones first.
    """
    weights = {"w_up": w_up, "w_down": w_down}
    if w_gate is not None:
        weights = {"w_gate": w_gate, **weights}
    _check_tokens("x", x)
    for name, weight in weights.items():
        _check_weight(name, weight, columns=("x", x.shape[-1]))
        _check_same_dtype("x", x, name, weight)
        if weight.shape[0] != w_up.shape[0]:
            raise ValueError(
                f"{name}: has {weight.shape[0]} neurons (rows), w_up has {w_up.shape[0]}"
            )
    if token_mask is not None:
        if token_mask.dtype != jnp.bool_:
            raise ValueError(f"token_mask: dtype must be bool, got {token_mask.dtype}")
        if token_mask.shape != x.shape[:-1]:
            raise ValueError(
                f"token_mask: shape must be {x.shape[:-1]}, that of x without its last axis, "
                f"got {token_mask.shape}"
            )


def pack(dense, *, tile: int, slots: int) -> Twell:
    """Packs the non-zero (and NaN) entries of `dense` into TwELL.

    Differentiable: the gradient of a row that overflowed is NaN, as in `matmul_pack`.

    Args:
      dense: `[..., H]`, float32 or bfloat16.
      tile: columns in a tile, at least 1.
      slots: entries a (row, tile) has room for, from 1 to `tile`.

    Returns:
      A `Twell`; its `exact` is False where a tile held more than `slots` entries.

    Raises:
      ValueError: an argument has a wrong shape, dtype or value.
    """
    dense = jnp.asarray(dense)
    _check_tokens("dense", dense)
    _check_tile(tile, slots)
    return reference.pack(dense, tile=tile, slots=slots)


def unpack(twell: Twell) -> jax.Array:
    """The dense matrix `[..., H]` of `twell`; rows that overflowed are NaN, with their gradient."""
    return reference.unpack(twell)


def matmul_pack(x, w, *, tile: int, slots: int, backend: str = "auto") -> Twell:
    """Packs `relu(x w')`, rounded to the dtype of `x`, without keeping it dense.

    Differentiable in `x` and `w` through the packed values. Where a row overflowed,
    the gradients that depend on it are NaN.

    Args:
      x: `[..., D]`, float32 or bfloat16.
      w: `[H, D]`, in the dtype of x.
      tile: neurons in a tile, at least 1.
      slots: entries a (row, tile) has room for, from 1 to `tile`.
      backend: one of `pallas_kernels.BACKENDS`.

    Returns:
      A `Twell` of shape `[..., H]`.

    Raises:
      ValueError: an argument has a wrong shape, dtype or value.
      NotImplementedError: the named backend cannot serve these shapes or dtypes.
    """
    x, w = jnp.asarray(x), jnp.asarray(w)
    _check_tokens("x", x)
    _check_weight("w", w, columns=("x", x.shape[-1]))
    _check_same_dtype("x", x, "w", w)
    _check_tile(tile, slots)
    return dispatch.call("matmul_pack", backend, x, w, tile, slots)


def twell_matmul(twell: Twell, w, *, backend: str = "auto") -> jax.Array:
    """`unpack(twell) w`; the kernels touch only the rows of `w` that the entries name.

    Differentiable in `twell.value` and `w`. Rows that overflowed give NaN. The weights must
    be finite: the reference multiplies them by the zeros, too.

    Args:
      twell: a packed matrix of shape `[..., H]`.
      w: `[H, D]`, in the dtype of `twell`.
      backend: one of `pallas_kernels.BACKENDS`.

    Returns:
      `[..., D]` in the dtype of w.

    Raises:
      ValueError: an argument has a wrong shape or dtype.
      NotImplementedError: the named backend cannot serve these shapes or dtypes.
    """
    w = jnp.asarray(w)
    _check_weight("w", w)
    _check_same_dtype("twell", twell, "w", w)
    if w.shape[0] != twell.num_columns:
        raise ValueError(
            f"w: has {w.shape[0]} neurons (rows), twell has {twell.num_columns} columns"
        )
    return dispatch.call("twell_matmul", backend, twell, w)


def _check_tokens(name, array) -> None:
    if array.ndim < 1 or array.shape[-1] < 1:
        raise ValueError(f"{name}: shape must be [..., size] with size >= 1, got {array.shape}")
    if array.dtype not in _DTYPES:
        raise ValueError(f"{name}: dtype must be float32 or bfloat16, got {array.dtype}")


def _check_weight(name, weight, columns=None) -> None:
    if weight.ndim != 2 or 0 in weight.shape:
        raise ValueError(f"{name}: shape must be [H, D] with H, D >= 1, got {weight.shape}")
    if columns is not None and weight.shape[1] != columns[1]:
        raise ValueError(
            f"{name}: has {weight.shape[1]} columns, but the last axis of {columns[0]} has "
            f"{columns[1]}; weights are neuron-major [H, D]"
        )


def _check_same_dtype(name, array, other_name, other) -> None:
    if array.dtype != other.dtype:
        raise ValueError(
            f"{other_name}: dtype {other.dtype} differs from that of {name}, {array.dtype}"
        )


def _check_tile(tile, slots) -> None:
    if tile < 1:
        raise ValueError(f"tile: must be at least 1, got {tile}")
    if not 1 <= slots <= tile:
        raise ValueError(f"slots: must be from 1 to tile = {tile}, got {slots}")
