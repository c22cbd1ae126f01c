"""The backends that run the case table on this machine, and which cases they serve."""

import pytest

from pallas_kernels.mosaic_gpu.device import require_hopper


def _has_hopper() -> bool:
    try:
        require_hopper()
    except NotImplementedError:
        return False
    return True


_ON_GPU = [pytest.param("mosaic_gpu", marks=pytest.mark.gpu)] if _has_hopper() else []

BACKENDS = ("reference", *_ON_GPU)
GPU_BACKENDS = tuple(_ON_GPU)
F32_BACKENDS = ("reference",)


def with_backends(cases) -> list:
    """Parameters (case, backend): every case with every backend that serves its dtype.

    What is left out here must be refused: `test_mosaic_gpu` has it.
    """
    return [
        pytest.param(
            case, *_values(backend), marks=_marks(backend), id=f"{case}-{_values(backend)[0]}"
        )
        for case in cases
        for backend in BACKENDS
        if _values(backend)[0] == "reference" or case.dtype == "bfloat16"
    ]


def _values(backend):
    return getattr(backend, "values", (backend,))


def _marks(backend):
    return getattr(backend, "marks", ())
