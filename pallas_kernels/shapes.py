"""Which shapes and dtypes the kernels serve, padding to them, and the types of their results."""

import jax
import jax.numpy as jnp

from pallas_kernels.words import MAX_NEURONS

# Elements of D that a step of the packing matmuls takes.
WIDTH_MULTIPLE = 64

# A wider row does not fit the registers of a thread block.
MAX_WIDTH = 8192


def check_weights(backend: str, x, w) -> None:
    """Raises NotImplementedError for an operand x or a weight w `[H, D]` that is not served."""
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"backend {backend!r} serves bfloat16, got {x.dtype}")
    width = w.shape[1]
    if width % WIDTH_MULTIPLE or width > MAX_WIDTH:
        raise NotImplementedError(
            f"backend {backend!r} needs D to be a multiple of {WIDTH_MULTIPLE} up to "
            f"{MAX_WIDTH}, got {width}"
        )
    if w.shape[0] > MAX_NEURONS:
        raise NotImplementedError(
            f"backend {backend!r} serves up to {MAX_NEURONS} neurons, got {w.shape[0]}"
        )
    if 0 in x.shape:
        raise NotImplementedError(f"backend {backend!r} needs at least one token")


def pad_columns(array, multiple: int):
    """`array` with zeros behind its last axis, to a multiple."""
    missing = -array.shape[-1] % multiple
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, missing)]) if missing else array


def varying(results, operands) -> tuple:
    """`results` as a `jax.shard_map` must know them: they differ over devices as `operands` do."""

    def axes_of(array):
        return jax.typeof(array).manual_axis_type.varying

    axes = frozenset().union(*map(axes_of, operands))

    def marked(result):
        missing = tuple(sorted(axes - axes_of(result)))
        return jax.lax.pcast(result, missing, to="varying") if missing else result

    return tuple(map(marked, results))
