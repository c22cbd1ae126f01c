"""Which device the kernels are for."""

import jax

# Of an H100 or H200 (SXM): what is assumed where there is no GPU, to lower or interpret.
_HOPPER_SMS = 132

# Shared memory of a multiprocessor that thread blocks can use, with room for the compiler's own.
SMEM_BYTES = 224 * 1024
REGISTERS = 65536


def require_hopper(backend: str = "mosaic_gpu") -> None:
    """Raises NotImplementedError unless the default device is a Hopper GPU."""
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    if device.platform != "gpu" or capability != "9.0":
        found = device.device_kind if capability is None else f"{device.device_kind} ({capability})"
        raise NotImplementedError(
            f"backend {backend!r} needs a Hopper GPU (compute capability 9.0), found {found}"
        )


def num_sms() -> int:
    """Multiprocessors of the default device."""
    return getattr(jax.devices()[0], "core_count", None) or _HOPPER_SMS
