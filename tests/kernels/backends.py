"""The backends that run the case table on this machine, and which cases they serve."""

import pytest

from pallas_kernels.mosaic_gpu.device import require_hopper
from pallas_kernels.triton_gpu.device import require_triton


def _runs_here(*requirements) -> bool:
    try:
        for require in requirements:
            require("")
    except NotImplementedError:
        return False
    return True


_NEEDS = {
    "mosaic_triton": (require_hopper, require_triton),
    "mosaic_gpu": (require_hopper,),
    "triton": (require_triton,),
}
_HERE = [name for name, needs in _NEEDS.items() if _runs_here(*needs)]
_ON_GPU = [pytest.param(name, marks=pytest.mark.gpu) for name in _HERE]

# Those that have the packed matmuls, too.
PACKING_BACKENDS = ("reference", *(p for p in _ON_GPU if p.values[0] != "mosaic_triton"))

BACKENDS = ("reference", *_ON_GPU)
GPU_BACKENDS = tuple(_ON_GPU)
F32_BACKENDS = ("reference",)


def with_backends(cases, backends=None) -> list:
    """Parameters (case, backend): every case with every backend that serves its dtype.

    What is left out here must be refused: `test_mosaic_gpu` and `test_triton` have it.
    """
    return [
        pytest.param(
            case, *_values(backend), marks=_marks(backend), id=f"{case}-{_values(backend)[0]}"
        )
        for case in cases
        for backend in backends or BACKENDS
        if _values(backend)[0] == "reference" or case.dtype == "bfloat16"
    ]


def _values(backend):
    return getattr(backend, "values", (backend,))


def _marks(backend):
    return getattr(backend, "marks", ())
