"""What a finished run shows: a table of the layers, a plot, a summary file."""

import pathlib

import matplotlib.figure
import matplotlib.ticker
import numpy as np
import rich.table

from twell_jax.console import console
from twell_jax.training.evaluate import Evaluation
from twell_jax.training.metrics import read_metrics

PLOT_FILE = "activation_sparsity.png"
SUMMARY_FILE = "summary.json"


def print_evaluation(evaluation: Evaluation, intermediate_size: int) -> None:
    """Validation cross-entropy, and the sparsity of every layer."""
    console.print(
        f"validation cross-entropy {evaluation.cross_entropy:.4f} nats over "
        f"{evaluation.num_targets:,} tokens; their unigram entropy is "
        f"{evaluation.unigram_entropy:.4f}",
        soft_wrap=True,
    )
    if evaluation.l0 is None:
        return
    table = rich.table.Table(title="active neurons on the validation text")
    for heading in ("layer", "mean L0", "share of neurons", "never active"):
        table.add_column(heading, justify="right")
    for layer, (l0, silent) in enumerate(
        zip(evaluation.l0, evaluation.silent_fraction, strict=True)
    ):
        table.add_row(str(layer), f"{l0:.1f}", f"{l0 / intermediate_size:.2%}", f"{silent:.1%}")
    console.print(table)


def print_outputs(workdir: pathlib.Path) -> None:
    """Where the run left what."""
    console.print("outputs:")
    for entry in sorted(workdir.iterdir()):
        console.print(f"  {entry}{'/' if entry.is_dir() else ''}", markup=False, soft_wrap=True)


def training_summary(workdir: pathlib.Path, num_steps: int) -> dict:
    """What WORKDIR/metrics.jsonl says of the whole run, in a few numbers.

    `last_tenth`: means over the logged steps of the last tenth of the run, of cross-entropy
    and, with sparse layers, of L0, dead fraction (by layer) and coefficient. `num_revived`:
    neurons revived in the whole run, by layer; None if the run revives none.
    """
    rows = read_metrics(workdir)
    tail = [row for row in rows if row["kind"] == "train" and row["step"] > 0.9 * num_steps]
    names = ("cross_entropy", "l0", "dead_fraction", "l1_coefficient")
    revived = [row["num_revived"] for row in rows if row["kind"] == "revive"]
    return {
        "last_tenth": {
            name: np.mean([row[name] for row in tail], axis=0).tolist()
            for name in names
            if tail and name in tail[0]
        },
        "num_revived": np.sum(revived, axis=0).tolist() if revived else None,
    }


def plot_sparsity(workdir: pathlib.Path, intermediate_size: int) -> pathlib.Path | None:
    """Draws WORKDIR/activation_sparsity.png from the metrics; None without sparse layers.

    The object interface of matplotlib is used, which needs no display and leaves a
    user's pyplot state alone.
    """
    rows = [row for row in read_metrics(workdir) if row["kind"] == "train" and "l0" in row]
    if not rows:
        return None
    steps = [row["step"] for row in rows]
    figure = matplotlib.figure.Figure(figsize=(9, 6), layout="constrained")
    active, dead = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    num_layers = len(rows[0]["l0"])
    for layer in range(num_layers):
        style = {
            "color": matplotlib.colormaps["viridis"](layer / max(num_layers - 1, 1)),
            "label": f"layer {layer}" if num_layers <= 12 or layer in (0, num_layers - 1) else None,
        }
        active.plot(steps, [row["l0"][layer] / intermediate_size for row in rows], **style)
        dead.plot(steps, [row["dead_fraction"][layer] for row in rows], **style)
    # Linear under 1e-4, so that layers that are all dead can be drawn, too.
    active.set_yscale("symlog", linthresh=1e-4)
    active.set_ylabel("active share of neurons (L0 / H)")
    active.set_title("Activation sparsity by layer")
    active.legend(loc="upper right", fontsize="small")
    dead.set_ylabel("dead share")
    dead.set_xlabel("step")
    for axes in (active, dead):
        axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(xmax=1))
        axes.grid(alpha=0.3)
    path = workdir / PLOT_FILE
    figure.savefig(path, dpi=120)
    return path
