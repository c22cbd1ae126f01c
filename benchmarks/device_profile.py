"""Where the time of a GPU goes, by kind of kernel."""

import collections
import pathlib
import re
import tempfile
from collections.abc import Callable

import jax

# First match counts. Names as cuDNN, cuBLAS, XLA and Triton give them.
_KINDS = (
    ("attention", re.compile(r"cudnn|sdpa|flash", re.IGNORECASE)),
    ("matmul", re.compile(r"gemm|nvjet|cutlass|wgmma|dot", re.IGNORECASE)),
    ("copy", re.compile(r"memcpy|memset", re.IGNORECASE)),
    ("scatter", re.compile(r"scatter", re.IGNORECASE)),
)


def kernel_times(run: Callable[[], None], repeats: int, top: int = 12) -> dict:
    """Milliseconds of one `run` by kind of kernel, and its `top` kernels by name.

    Args:
      run: does the work once and waits for it.
      repeats: how often it is run under the profiler.
      top: number of kernels to name.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(repeats):
                run()
        (trace,) = pathlib.Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(trace))
        times = collections.Counter()
        for plane in profile.planes:
            if "GPU" not in plane.name:
                continue
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    for event in line.events:
                        times[event.name] += event.duration_ns / 1e6 / repeats
    kinds = collections.Counter()
    for name, milliseconds in times.items():
        kind = next((kind for kind, pattern in _KINDS if pattern.search(name)), "elementwise")
        kinds[kind] += milliseconds
    return {
        "by_kind_ms": dict(kinds.most_common()),
        "top_kernels_ms": {name[:80]: ms for name, ms in times.most_common(top)},
    }
