"""What a measurement was made on: device, driver, library versions, commit."""

import importlib.metadata
import pathlib
import platform
import shutil
import subprocess

import jax

_PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "tokenizers",
    "jax-triton",
    "triton",
)


def describe_environment() -> dict:
    """`device`, `device_count`, `driver`, `versions` by package, and `commit` (None if unknown)."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "device": jax.devices()[0].device_kind,
        "device_count": jax.device_count(),
        "driver": _gpu_driver(),
        "versions": versions,
        "commit": git_commit(),
    }


def git_commit() -> str | None:
    """Commit of the checkout this package runs from, marked if files differ from it."""
    root = pathlib.Path(__file__).parents[1]
    commit = _output("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    if not commit:
        return None
    changed = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return f"{commit}-modified" if changed else commit


def _gpu_driver() -> str | None:
    if jax.default_backend() != "gpu":
        return None
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[
        0
    ]


def _output(*command: str) -> str:
    """Output of a command; empty if it is not there or fails."""
    if shutil.which(command[0]) is None:
        return ""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else ""
