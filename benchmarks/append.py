r"""Appends rows that were measured on a machine without the repository.

python -m benchmarks.append --name=train_step --rows=rows.jsonl --commit=0123456789ab
"""

import json
import pathlib
import sys

from absl import app, flags

from benchmarks.results import append_row, state_commit

_NAME = flags.DEFINE_string("name", None, "Name of the benchmark.", required=True)
_ROWS = flags.DEFINE_string("rows", None, "File that --output of it wrote.", required=True)
_COMMIT = flags.DEFINE_string("commit", None, "Commit that was measured.", required=True)


def main(argv: list[str]) -> None:
    """Command line of `python -m benchmarks.append`."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    for line in pathlib.Path(_ROWS.value).read_text().splitlines():
        row = json.loads(line)
        try:
            environment = state_commit(row["environment"], _COMMIT.value)
            path = append_row(_NAME.value, environment, row["config"], row["values"])
        except ValueError as error:
            sys.exit(f"append: {error}")
    print(f"appended to {path}")


if __name__ == "__main__":
    app.run(main)
