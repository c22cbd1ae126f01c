"""Compiles every Triton kernel for GPUs that need not be there.

python -m tests.kernels.triton_compiled
"""

import jax.numpy as jnp
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pallas_kernels.triton_gpu import backward, launch

# Compute capability of A100, RTX 4090, H200, B200, RTX PRO 6000; shared memory of a thread block.
SHARED_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
TYPES = {"bfloat16": "*bf16", "int32": "*i32", "float32": "*fp32"}


def compile_kernel(kernel, pointers, capability, num_warps, num_stages, **constants):
    """Shared memory that it needs."""
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        signature=dict(zip(names, [*pointers, *["constexpr"] * len(constants)], strict=True)),
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in range(len(pointers))},
    )
    options = {"num_warps": num_warps, "num_stages": num_stages}
    compiled = triton.compile(source, GPUTarget("cuda", capability, 32), options)
    return compiled.metadata.shared


def main():
    calls = []

    # The launches as they are, with the call into JAX taken out.
    def call(
        kernel, *operands, out_type, grid, zeroed=False, num_warps=4, num_stages=3, **constants
    ):
        del grid, zeroed
        pointers = [TYPES[str(jnp.dtype(array.dtype))] for array in (*operands, *out_type)]
        calls.append((kernel, pointers, num_warps, num_stages, constants))
        return [jnp.zeros(out.shape, out.dtype) for out in out_type]

    launch.call = backward.call = call
    for rows, width, neurons in ((1, 64, 7), (257, 576, 5632)):
        x = jnp.zeros((rows, width), jnp.bfloat16)
        w = jnp.zeros((neurons, width), jnp.bfloat16)
        words, _ = launch.pack_words(x, w, None, config=launch.PackConfig())
        lists = launch.make_lists(words, jnp.zeros(rows, jnp.int32), 100)
        launch.up_down(lists, x, w, w, x)
        launch.up_down(lists, None, None, w, None)
        scale, dw_start = jnp.zeros(rows), (jnp.zeros(w.shape),) * 3
        backward.gradients(lists, scale, x, x, w, w, w, x, dw_start)
        backward.gradients(lists, scale, x, x, None, w, w, None, None)
    for capability, limit in SHARED_MEMORY.items():
        for kernel, *rest, constants in calls:
            shared = compile_kernel(kernel, rest[0], capability, *rest[1:], **constants)
            print(f"sm_{capability} {kernel.__name__}: {shared} bytes of shared memory")
            assert shared <= limit


if __name__ == "__main__":
    main()
