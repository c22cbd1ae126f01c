"""Settings of all tests, made before JAX starts."""

import atexit
import os
import shutil
import tempfile

# Several test processes share one GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# Test processes, and the commands that they start, compile the same models: once is enough.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _cache = tempfile.mkdtemp(prefix="twell_jax-tests-")
    atexit.register(shutil.rmtree, _cache, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax

# Tests hold f32 to f32: by default a GPU multiplies it as TF32, with 10 bits.
jax.config.update("jax_default_matmul_precision", "highest")
