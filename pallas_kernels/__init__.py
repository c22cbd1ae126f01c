"""Kernels for feed-forward layers whose hidden activations are mostly zero.

Arrays in, arrays out: nothing here knows about models or training. The public
operations are in `pallas_kernels.ops`, their meaning is defined by
`pallas_kernels.reference`, and every other backend is judged by it.
"""

from pallas_kernels.dispatch import BACKENDS
from pallas_kernels.ops import FfnStats, matmul_pack, pack, sparse_ffn, twell_matmul, unpack
from pallas_kernels.plan import FfnPlan
from pallas_kernels.twell import Twell

__all__ = [
    "BACKENDS",
    "FfnPlan",
    "FfnStats",
    "Twell",
    "matmul_pack",
    "pack",
    "sparse_ffn",
    "twell_matmul",
    "unpack",
]
