"""Runs Triton kernels on the CPU, in the interpreter that Triton has for debugging.

Stands in for `launch.call`: same arguments, same results.
"""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from pallas_kernels.shapes import varying

# Bits of what a kernel does not write: NaN as a float, and far outside of any index.
_UNWRITTEN = 0xFFC1


class _Builder(interpreter.InterpreterBuilder):
    """The interpreter's arithmetic where it differs from a GPU's."""

    def create_dot(self, a, b, d, *_):
        """A product of bf16; the interpreter multiplies their bits as if they were integers."""
        assert a.dtype.scalar == b.dtype.scalar == tl.bfloat16
        a, b = ((array.data.astype(np.uint32) << 16).view(np.float32) for array in (a, b))
        return interpreter.TensorHandle(np.matmul(a, b) + d.data, d.dtype.scalar)

    def create_fp_trunc(self, src, dst_type):
        """To the nearest bf16; the interpreter cuts digits off."""
        assert src.dtype.scalar == tl.float32
        assert dst_type.scalar == tl.bfloat16
        rounded = src.data.astype(jnp.bfloat16).view(np.uint16)
        return interpreter.TensorHandle(rounded, tl.bfloat16)


interpreter.interpreter_builder.__class__ = _Builder


# The interpreter keeps its grid and patched functions in globals; devices run in threads.
_one_at_a_time = threading.Lock()


class _Memory:
    """A numpy array, in the form of the tensors that the interpreter takes."""

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, f"numpy.{array.dtype}"

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    # The interpreter copies its arguments to the host and back, by their storage. They are there.
    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def new_empty(self, *_, **__):
        return self

    def set_(self, *_):
        return self

    def copy_(self, *_):
        return self

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return self.array.strides


def _unwritten(shape, dtype) -> np.ndarray:
    bytes_of = np.full(int(np.prod(shape)) * jnp.dtype(dtype).itemsize // 2, _UNWRITTEN, np.uint16)
    return bytes_of.view(dtype).reshape(shape)


def call(kernel, *operands, out_type, grid, zeroed=False, num_warps=4, num_stages=3, **constants):
    """See `pallas_kernels.triton_gpu.call.call`."""
    del num_warps, num_stages

    def run(*arrays):
        arrays = [np.array(array) for array in arrays]
        new = np.zeros if zeroed else _unwritten
        results = [new(out.shape, out.dtype) for out in out_type]
        memory = [_Memory(array) for array in (*arrays, *results)]
        with _one_at_a_time:
            kernel[grid](*memory, **constants)
        return tuple(results)

    return varying(jax.pure_callback(run, tuple(out_type), *operands), operands)
