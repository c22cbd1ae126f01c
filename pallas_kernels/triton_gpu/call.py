"""Calls of Triton kernels from JAX: the one place that knows jax-triton's versions."""

import inspect
import warnings

from pallas_kernels.shapes import varying


def call(kernel, *operands, out_type, grid, zeroed=False, num_warps=4, num_stages=3, **constants):
    """Runs `kernel` on `operands`; returns arrays of `out_type`, a tuple.

    They are undefined at first; with `zeroed` they are 0.

    Under `jax.shard_map` the results differ over devices where an operand does.
    """
    import jax_triton

    # Its name up to version 0.3.
    takes_shape = "out_shape" in inspect.signature(jax_triton.triton_call).parameters
    with warnings.catch_warnings():
        # Version 0.4 would rather have references for `zeroed_outputs`, which 0.3 has not.
        warnings.simplefilter("ignore", DeprecationWarning)
        results = jax_triton.triton_call(
            *operands,
            kernel=kernel,
            grid=grid,
            num_warps=num_warps,
            num_stages=num_stages,
            zeroed_outputs=tuple(range(len(out_type))) if zeroed else (),
            **{"out_shape" if takes_shape else "out_type": out_type},
            **constants,
        )
    return varying(results, operands)
