"""Where the Triton kernels can run."""

import importlib.metadata
import importlib.util
import re

import jax

# The newest jax-triton that jax from 0.12 on cannot lower: it calls one of its rules otherwise.
_TOO_OLD_FOR_JAX_0_12 = (0, 4, 1)

# bf16 matrix units came with Ampere.
_OLDEST = (8, 0)


def require_triton(backend: str) -> None:
    """Raises NotImplementedError unless jax-triton is installed and the GPU has bf16 matmuls."""
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    # That of an AMD GPU is a name.
    if device.platform != "gpu" or not re.fullmatch(r"\d+\.\d+", str(capability)):
        raise NotImplementedError(
            f"backend {backend!r} needs an NVIDIA GPU, found {device.device_kind}"
        )
    if tuple(map(int, capability.split("."))) < _OLDEST:
        raise NotImplementedError(
            f"backend {backend!r} needs compute capability 8.0 or newer, "
            f"found {device.device_kind} ({capability})"
        )
    if importlib.util.find_spec("jax_triton") is None:
        raise NotImplementedError(
            f"backend {backend!r} needs jax-triton, which is not installed "
            "(pip install 'twell-jax[triton]')"
        )
    version = importlib.metadata.version("jax-triton")
    numbers = tuple(map(int, re.findall(r"\d+", version)[:3]))
    if jax.__version_info__ >= (0, 12) and numbers <= _TOO_OLD_FOR_JAX_0_12:
        raise NotImplementedError(
            f"backend {backend!r}: jax-triton {version} does not work with jax {jax.__version__} "
            "(pip install 'jax<0.12')"
        )
