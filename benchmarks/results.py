"""Rows of results: one JSON object a line, appended, never edited."""

import datetime
import json
import pathlib
import subprocess

RESULTS = pathlib.Path(__file__).parent / "results"


def append_row(name: str, environment: dict, config: dict, values: dict) -> pathlib.Path:
    """Appends a row to benchmarks/results/NAME.jsonl and returns the file.

    Args:
      name: of the benchmark.
      environment: of `twell_jax.environment.describe_environment`; its commit must be known.
      config: what was measured.
      values: what came out.

    Raises:
      ValueError: the commit is not known, or the measured files were not committed.
    """
    commit = environment.get("commit")
    if not commit or commit.endswith("-modified"):
        raise ValueError(f"a row needs the commit that was measured, this one has {commit!r}")
    row = {
        "name": name,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **{key: environment[key] for key in ("commit", "device", "driver", "versions")},
        "config": config,
        "values": values,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.jsonl"
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    return path


def state_commit(environment: dict, commit: str) -> dict:
    """The environment of a run on a copy of the files of `commit`, made without the commit.

    Raises:
      ValueError: the environment names another commit, whose files were not changed, or this
        repository has no such commit.
    """
    seen = environment["commit"]
    if seen not in (None, commit) and not seen.endswith("-modified"):
        raise ValueError(f"the row says that commit {seen} was measured, not {commit}")
    command = ["git", "-C", str(RESULTS.parent), "cat-file", "-e", f"{commit}^{{commit}}"]
    if len(commit) < 12 or subprocess.run(command, capture_output=True, check=False).returncode:
        raise ValueError(f"no commit {commit} (give at least 12 digits)")
    return {**environment, "commit": commit}
