"""The progress bar of a run."""

import rich.progress
from absl import logging

from twell_jax.console import console, progress_columns

_FIELDS = "CE {ce:.3f}  L1 {l1:.3g}  L0 {l0:.1f}  dead {dead:.1%}  {rate:,.0f} tokens/s"


class TrainingProgress:
    """A bar on a terminal, log lines elsewhere."""

    def __init__(self, num_steps: int, first_step: int):
        """The bar starts at `first_step`."""
        columns = progress_columns(
            rich.progress.MofNCompleteColumn(),
            rich.progress.TextColumn("{task.fields[text]}"),
        )
        self._progress = rich.progress.Progress(
            *columns, console=console, disable=not console.is_terminal
        )
        self._task = self._progress.add_task(
            "training", total=num_steps, completed=first_step, text=""
        )
        self._num_steps = num_steps

    def __enter__(self):
        self._progress.start()
        return self

    def __exit__(self, *_):
        self._progress.stop()

    def step(self, step: int) -> None:
        """`step` steps are done."""
        self._progress.update(self._task, completed=step)

    def show(self, step: int, values: dict) -> None:
        """Shows a row of training metrics."""
        sparse = "l0" in values
        text = _FIELDS.format(
            ce=values["cross_entropy"],
            l1=values["l1"] if sparse else float("nan"),
            l0=_mean(values["l0"]) if sparse else float("nan"),
            dead=_mean(values["dead_fraction"]) if sparse else float("nan"),
            rate=values.get("tokens_per_second", float("nan")),
        )
        self._progress.update(self._task, text=text)
        if not console.is_terminal:
            logging.info("step %d/%d  %s", step, self._num_steps, text)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
