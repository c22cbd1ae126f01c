"""Which backend serves an operation: the one place that decides it."""

import logging
from collections.abc import Callable
from typing import NamedTuple

from pallas_kernels import reference
from pallas_kernels.mosaic_gpu import ffn as mosaic_ffn
from pallas_kernels.mosaic_gpu import matmuls as mosaic_matmuls
from pallas_kernels.triton_gpu import ffn as triton_ffn
from pallas_kernels.triton_gpu import matmuls as triton_matmuls

_logger = logging.getLogger(__name__)


class Implementation(NamedTuple):
    """An operation on one backend.

    Attributes:
      check: raises NotImplementedError, saying why, if the backend cannot serve these
        arguments on this machine. It takes those of `run`, and looks at shapes and dtypes
        only. The decision is made here and nowhere else: a refusal in the midst of a trace,
        or of a backward pass, would come too late to take another backend.
      run: does it.
      trains_by_kernels: its backward pass has kernels, too; else a differentiated call is the
        reference.
    """

    check: Callable[..., None]
    run: Callable
    trains_by_kernels: bool = False


def _serves_all(*_, **__) -> None:
    """The check of a backend that serves everything."""


# In the order in which "auto" tries them. What a backend lacks or refuses passes to the next.
# "mosaic_triton" packs by Mosaic GPU and multiplies by Triton, the faster of each on Hopper.
_OPERATIONS: dict[str, dict[str, Implementation]] = {
    "mosaic_triton": {
        "sparse_ffn": Implementation(
            triton_ffn.check_sparse_ffn_on_hopper,
            triton_ffn.sparse_ffn_on_hopper,
            trains_by_kernels=True,
        ),
    },
    "mosaic_gpu": {
        "sparse_ffn": Implementation(mosaic_ffn.check_sparse_ffn, mosaic_ffn.sparse_ffn),
        "matmul_pack": Implementation(mosaic_matmuls.check_matmul_pack, mosaic_matmuls.matmul_pack),
        "twell_matmul": Implementation(
            mosaic_matmuls.check_twell_matmul, mosaic_matmuls.twell_matmul
        ),
    },
    "triton": {
        "sparse_ffn": Implementation(
            triton_ffn.check_sparse_ffn, triton_ffn.sparse_ffn, trains_by_kernels=True
        ),
        "matmul_pack": Implementation(triton_matmuls.check_matmul_pack, triton_matmuls.matmul_pack),
        "twell_matmul": Implementation(
            triton_matmuls.check_twell_matmul, triton_matmuls.twell_matmul
        ),
    },
    "reference": {
        "sparse_ffn": Implementation(_serves_all, reference.sparse_ffn),
        "matmul_pack": Implementation(_serves_all, reference.matmul_pack),
        "twell_matmul": Implementation(_serves_all, reference.twell_matmul),
    },
}

BACKENDS = ("auto", *_OPERATIONS)

# Not for "auto" yet: their gradients were checked interpreted and compiled, not on a GPU.
_BY_NAME_ONLY = ("mosaic_triton", "triton")

_logged: set[str] = set()


def check_backend(backend: str) -> None:
    """Raises ValueError, listing the known names, if `backend` is not one of them."""
    if backend not in BACKENDS:
        raise ValueError(f"backend: unknown name {backend!r}; known are {', '.join(BACKENDS)}")


class _Choice(NamedTuple):
    name: str
    implementation: Implementation
    refusals: list[str]


def _choose(operation: str, backend: str, *args, **kwargs) -> _Choice:
    """The named backend; with "auto" the first one that serves, and why others do not."""
    check_backend(backend)
    auto = backend == "auto"
    names = [n for n in _OPERATIONS if n not in _BY_NAME_ONLY] if auto else [backend]
    refusals = []
    for name in names:
        try:
            implementation = _OPERATIONS[name].get(operation)
            if implementation is None:
                raise NotImplementedError(f"backend {name!r} has no {operation}")
            implementation.check(*args, **kwargs)
        except NotImplementedError as error:
            if not auto:
                raise
            refusals.append(str(error))
            continue
        return _Choice(name, implementation, refusals)
    raise NotImplementedError(f"no backend can serve {operation}: {'; '.join(refusals)}")


def call(operation: str, backend: str, *args, **kwargs):
    """Runs `operation` on `backend`; with "auto" on the first one that can serve it.

    Raises:
      ValueError: `backend` is not a known name.
      NotImplementedError: the named backend cannot serve these arguments.
    """
    choice = _choose(operation, backend, *args, **kwargs)
    if backend == "auto":
        message = f"{operation} runs on backend {choice.name!r}"
        if choice.refusals:
            _log_once(logging.WARNING, f"{message} ({'; '.join(choice.refusals)})")
        else:
            _log_once(logging.INFO, message)
    return choice.implementation.run(*args, **kwargs)


def trains_by_kernels(operation: str, backend: str, *args, **kwargs) -> bool:
    """Whether kernels would serve the gradient of `call` with these arguments.

    Looks at shapes and dtypes only; raises what `call` raises.
    """
    return _choose(operation, backend, *args, **kwargs).implementation.trains_by_kernels


def _log_once(level: int, message: str) -> None:
    if message not in _logged:
        _logged.add(message)
        _logger.log(level, message)
