"""The plain-JAX reference: it defines what every operation means, on any device."""

from pallas_kernels.reference.ffn import FfnStats, sparse_ffn
from pallas_kernels.reference.packing import matmul_pack, pack, twell_matmul, unpack

__all__ = ["FfnStats", "matmul_pack", "pack", "sparse_ffn", "twell_matmul", "unpack"]
