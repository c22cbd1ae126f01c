"""Which backend serves an operation: the one place that decides it."""

import logging
from collections.abc import Callable

from pallas_kernels import reference

_logger = logging.getLogger(__name__)

# In the order in which "auto" tries them. An operation that a backend lacks, or a
# shape it cannot serve (the operation raises NotImplementedError while it is
# traced), passes to the next one.
_OPERATIONS: dict[str, dict[str, Callable]] = {
    "mosaic_gpu": {},
    "triton": {},
    "reference": {
        "sparse_ffn": reference.sparse_ffn,
        "matmul_pack": reference.matmul_pack,
        "twell_matmul": reference.twell_matmul,
    },
}

BACKENDS = ("auto", *_OPERATIONS)

_logged: set[str] = set()


def check_backend(backend: str) -> None:
    """Raises ValueError, listing the known names, if `backend` is not one of them."""
    if backend not in BACKENDS:
        raise ValueError(f"backend: unknown name {backend!r}; known are {', '.join(BACKENDS)}")


def _call(backend: str, operation: str, *args, **kwargs):
    function = _OPERATIONS[backend].get(operation)
    if function is None:
        raise NotImplementedError(f"backend {backend!r} has no {operation} yet")
    return function(*args, **kwargs)


def call(operation: str, backend: str, *args, **kwargs):
    """Runs `operation` on `backend`; with "auto" on the first one that can serve it.

    Raises:
      ValueError: `backend` is not a known name.
      NotImplementedError: the named backend cannot serve these arguments.
    """
    check_backend(backend)
    if backend != "auto":
        return _call(backend, operation, *args, **kwargs)
    refusals = []
    for name in _OPERATIONS:
        try:
            result = _call(name, operation, *args, **kwargs)
        except NotImplementedError as error:
            refusals.append(str(error))
            continue
        if refusals:
            _log_once(f"{operation} runs on backend {name!r} ({'; '.join(refusals)})")
        return result
    raise NotImplementedError(f"no backend can serve {operation}: {'; '.join(refusals)}")


def _log_once(message: str) -> None:
    if message not in _logged:
        _logged.add(message)
        _logger.warning(message)
