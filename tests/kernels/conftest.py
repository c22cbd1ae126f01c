"""Without a GPU, Triton kernels are interpreted; triton asks for that when it is imported."""

import os

import jax

if jax.default_backend() != "gpu":
    os.environ["TRITON_INTERPRET"] = "1"
