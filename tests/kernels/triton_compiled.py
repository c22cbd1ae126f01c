"""Compiles every Triton kernel for GPUs that need not be there.

python -m tests.kernels.triton_compiled
"""

import jax.numpy as jnp
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pallas_kernels.triton_gpu import launch

# Compute capability of A100, RTX 4090, H200, B200, RTX PRO 6000; shared memory of a thread block.
SHARED_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
POINTERS = {
    **dict.fromkeys(("x", "w", "w_up", "w_down", "y"), "*bf16"),
    **dict.fromkeys(("token_weight", "words", "fired", "lists", "lengths", "num_active"), "*i32"),
    "norms": "*fp32",
}


def compile_kernel(kernel, capability, num_warps, num_stages, **constants):
    """Shared memory that it needs."""
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        signature={name: POINTERS.get(name, "constexpr") for name in names},
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in POINTERS},
    )
    options = {"num_warps": num_warps, "num_stages": num_stages}
    compiled = triton.compile(source, GPUTarget("cuda", capability, 32), options)
    return compiled.metadata.shared


def main():
    calls = []

    # The launches as they are, with the call into JAX taken out.
    def call(kernel, *_, out_type, grid, num_warps, num_stages, **constants):
        del grid
        calls.append((kernel, num_warps, num_stages, constants))
        return [jnp.zeros(out.shape, out.dtype) for out in out_type]

    launch.call = call
    for rows, width, neurons in ((1, 64, 7), (257, 576, 5632)):
        x = jnp.zeros((rows, width), jnp.bfloat16)
        w = jnp.zeros((neurons, width), jnp.bfloat16)
        words, _ = launch.pack_words(x, w, None, config=launch.PackConfig())
        lists, lengths, _ = launch.make_lists(words)
        launch.up_down(lists, lengths, x, w, w)
        launch.up_down(lists, lengths, None, None, w)
    for capability, limit in SHARED_MEMORY.items():
        for kernel, num_warps, num_stages, constants in calls:
            shared = compile_kernel(kernel, capability, num_warps, num_stages, **constants)
            print(f"sm_{capability} {kernel.__name__}: {shared} bytes of shared memory")
            assert shared <= limit


if __name__ == "__main__":
    main()
