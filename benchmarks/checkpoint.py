r"""Times what a checkpoint costs the training loop.

  python -m benchmarks.checkpoint --config=configs/small.py --config.data.path=data/books

Saving is asynchronous: the loop waits while the state is copied to the host, and files are
written beside the steps that follow. Measured: steps before a save, the wait of the save,
the steps until its files are complete, and the device-to-host copy alone. Writes one row.
"""

import json
import pathlib
import sys
import tempfile
import time

import jax
import numpy as np
from absl import app, flags

from benchmarks.results import append_row
from benchmarks.timing import spread
from benchmarks.trainer import Trainer
from twell_jax.data import store
from twell_jax.data.pipeline import training_dataset
from twell_jax.environment import describe_environment
from twell_jax.errors import UserError
from twell_jax.training.checkpoint import Checkpointer
from twell_jax.training.flags import define_config_flag, parse_flags

_SAVES = flags.DEFINE_integer("saves", 5, "Checkpoints to write.", lower_bound=3)
_STEPS = flags.DEFINE_integer("steps", 20, "Steps after each.", lower_bound=5)
_OUTPUT = flags.DEFINE_string(
    "output", "", "Write the row to this file, for `append`; by default to benchmarks/results."
)


def measure(config, folder: pathlib.Path) -> dict:
    """The values of the row; checkpoints go to `folder`."""
    trainer = Trainer(config)
    batches = iter(
        training_dataset(
            config.data.path,
            sequence_length=config.data.sequence_length,
            batch_size=config.train.batch_size,
            seed=config.train.seed,
        )
    )
    batch = jax.device_put(next(batches))
    trainer.run(lambda: batch, 5)
    checkpointer = Checkpointer(folder, config.checkpoint, store.fingerprint(config.data.path))
    undisturbed, after, waits, copies = [], [], [], []
    for number in range(_SAVES.value):
        undisturbed += trainer.run(lambda: batch, _STEPS.value)
        jax.block_until_ready(trainer.state)
        start = time.perf_counter()
        checkpointer.save(number + 1, trainer.state, batches.get_state(), None, config)
        waits.append(time.perf_counter() - start)
        after += trainer.run(lambda: batch, _STEPS.value)
        checkpointer.wait()
        # Of fresh arrays: a copy that a jax.Array has made before it keeps.
        fresh = jax.block_until_ready(
            jax.jit(lambda s: jax.tree.map(lambda a: a + 0, s))(trainer.state)
        )
        start = time.perf_counter()
        jax.device_get(fresh)
        copies.append(time.perf_counter() - start)
    checkpointer.close()
    return {
        "step_ms": spread(undisturbed),
        "step_while_writing_ms": spread(after),
        "longest_step_while_writing_ms": 1e3 * max(after),
        "longest_undisturbed_step_ms": 1e3 * max(undisturbed),
        "save_wait_ms": spread(waits),
        "device_to_host_copy_ms": spread(copies),
        "state_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(trainer.state)),
        "last_loss": trainer.losses[-1],
    }


def main(argv: list[str]) -> None:
    """Command line of `python -m benchmarks.checkpoint`."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    config = _CONFIG.value
    try:
        config.validate()
        with tempfile.TemporaryDirectory() as folder:
            values = measure(config, pathlib.Path(folder))
    except UserError as error:
        sys.exit(f"checkpoint: {error}")
    if not np.isfinite(values["last_loss"]):
        sys.exit(f"checkpoint: the last loss is {values['last_loss']}")
    print(json.dumps(values, indent=2))
    described = {"model": vars(config.model), "batch_size": config.train.batch_size}
    row = {"environment": describe_environment(), "config": described, "values": values}
    if _OUTPUT.value:
        with open(_OUTPUT.value, "a") as file:
            file.write(json.dumps(row) + "\n")
    else:
        append_row("checkpoint", row["environment"], row["config"], row["values"])


if __name__ == "__main__":
    _CONFIG = define_config_flag("configs/small.py")
    app.run(main, flags_parser=parse_flags)
