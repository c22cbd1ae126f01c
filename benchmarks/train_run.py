r"""Keeps the result of a finished run as a row of benchmarks/results/train_run.jsonl.

python -m benchmarks.train_run --workdir=runs/tiny --label=tiny
"""

import json
import pathlib
import sys

from absl import app, flags

from benchmarks.results import append_row, state_commit
from twell_jax.training.report import training_summary

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a finished run.", required=True)
_LABEL = flags.DEFINE_string("label", None, "What the run is, in a few words.", required=True)
_COMMIT = flags.DEFINE_string(
    "commit", "", "Commit that ran, for a run on a machine without the repository."
)


def main(argv: list[str]) -> None:
    """Command line of `python -m benchmarks.train_run`."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    workdir = pathlib.Path(_WORKDIR.value)
    try:
        summary = json.loads((workdir / "summary.json").read_text())
        config = json.loads((workdir / "config.json").read_text())
    except OSError as error:
        sys.exit(f"--workdir: no finished run: {error}")
    environment = summary.pop("environment")
    # Of a run whose summary does not have it yet.
    summary.setdefault("training", training_summary(workdir, summary["step"]))
    # Where the data lay on that machine is nobody's business.
    config["data"]["path"] = pathlib.Path(config["data"]["path"]).name
    try:
        if _COMMIT.value:
            environment = state_commit(environment, _COMMIT.value)
        path = append_row("train_run", environment, {"label": _LABEL.value, **config}, summary)
    except ValueError as error:
        sys.exit(f"train_run: {error}")
    print(f"row appended to {path}")


if __name__ == "__main__":
    app.run(main)
