"""Rows of metrics, written as JSON lines and as TensorBoard events."""

import json
import os
import pathlib
import time

import numpy as np
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

METRICS_FILE = "metrics.jsonl"


class MetricsWriter:
    """Appends rows to WORKDIR/metrics.jsonl and events to WORKDIR/tensorboard.

    A row is `{"step", "kind", metric: number or list by layer}`. Its kind is "train",
    "validation", "revive" for a step that revived dead neurons, or "plan" for one after which
    layers got new plans.
    """

    def __init__(self, workdir: pathlib.Path, resumed_step: int, writes: bool = True):
        """Drops the rows of steps after `resumed_step`: those steps are taken again.

        With `writes=False`, for all processes but one, nothing is ever written.
        """
        self._writes = writes
        rows = [row for row in read_metrics(workdir) if row["step"] <= resumed_step]
        self._written = {(row["step"], row["kind"]) for row in rows}
        if not writes:
            return
        self._path = workdir / METRICS_FILE
        partial = self._path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.replace(partial, self._path)
        self._file = self._path.open("a", buffering=1)
        self._events = EventFileWriter(str(workdir / "tensorboard"))
        # Tells TensorBoard to forget what an earlier, cut-off process wrote past this step.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add_event(resumed_step + 1, session_log=start)

    def has(self, step: int, kind: str) -> bool:
        """There is such a row already, of this process or of the one that it continues."""
        return (step, kind) in self._written

    def write(self, step: int, kind: str, values: dict) -> None:
        """Writes one row, unless it is there; values are floats or lists of floats by layer."""
        if self.has(step, kind):
            return
        self._written.add((step, kind))
        if not self._writes:
            return
        self._file.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")
        summary = summary_pb2.Summary()
        for name, value in values.items():
            items = {name: value}
            if isinstance(value, list):
                items = {f"{name}/layer_{i}": v for i, v in enumerate(value)}
                items[f"{name}/mean"] = float(np.mean(value))
            for tag, number in items.items():
                summary.value.add(tag=f"{kind}/{tag}", simple_value=number)
        self._add_event(step, summary=summary)

    def _add_event(self, step, **content) -> None:
        self._events.add_event(event_pb2.Event(step=step, wall_time=time.time(), **content))

    def close(self) -> None:
        """Flushes and closes both files."""
        if not self._writes:
            return
        self._file.close()
        self._events.close()


def read_metrics(workdir: pathlib.Path) -> list[dict]:
    """All whole rows of WORKDIR/metrics.jsonl; a last line that was cut off is left out."""
    path = workdir / METRICS_FILE
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break  # the process was killed while it wrote this line
    return rows
