"""What people see on the terminal: one console and one style of progress bar."""

import contextlib
import logging
from collections.abc import Iterator

import rich.progress
from absl import logging as absl_logging
from rich.console import Console

# On stderr with the log lines, so that stdout stays free for results.
console = Console(stderr=True, highlight=False)


def quiet_libraries() -> None:
    """Leaves out what libraries log below WARNING: a page of Orbax at every checkpoint."""
    absl_logging.get_absl_handler().addFilter(
        lambda record: record.levelno >= logging.WARNING or "site-packages" not in record.pathname
    )


def progress_columns(*extra) -> tuple:
    """Columns of every bar: what, how far, how long it took and will take."""
    return (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        *extra,
        rich.progress.TimeElapsedColumn(),
        rich.progress.TimeRemainingColumn(),
    )


@contextlib.contextmanager
def progress_bar(description: str, total: int, unit: str = "") -> Iterator:
    """A bar that vanishes when it is done; yields a function that advances it."""
    amount = (
        rich.progress.DownloadColumn() if unit == "bytes" else rich.progress.MofNCompleteColumn()
    )
    columns = progress_columns(amount)
    with rich.progress.Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(description, total=total)
        yield lambda amount=1: progress.advance(task, amount)
