"""Settings of all tests, made before JAX starts."""

import os

# Several test processes share one GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax

# Tests hold f32 to f32: by default a GPU multiplies it as TF32, with 10 bits.
jax.config.update("jax_default_matmul_precision", "highest")
