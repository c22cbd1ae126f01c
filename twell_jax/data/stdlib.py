"""Real text that every machine has: the source of Python's standard library."""

import pathlib
import sysconfig

from twell_jax.errors import DataError

# Installed packages are no part of the library; tests are repetitive and may be missing.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}


def stdlib_files(max_bytes: int = 0) -> tuple[str, ...]:
    """Python files of the running interpreter's library, sorted by name.

    Args:
      max_bytes: stop before the files add up to more than this; 0 takes all.

    Raises:
      DataError: the interpreter ships no source.
    """
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    chosen, total = [], 0
    for path in sorted(root.rglob("*.py")):
        size = path.stat().st_size
        if _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts) or not size:
            continue
        total += size
        if max_bytes and total > max_bytes:
            break
        chosen.append(str(path))
    if not chosen:
        raise DataError(f"data.path=stdlib: no Python source under {root}; use another data.path")
    return tuple(chosen)
