r"""Times the train step of a configuration, alone and fed by its input pipeline.

  python -m benchmarks.train_step --config=configs/small.py --config.data.path=data/books

In turn, in one process: steps on one batch that stays on the device, and steps on batches
read, shuffled and transferred as in training. Also measured: what the host does for a
step, peak memory, and (with --profile) where the device's time goes. Writes one row.
"""

import json
import sys

import jax
import numpy as np
from absl import app, flags

from benchmarks.device_profile import kernel_times
from benchmarks.results import append_row
from benchmarks.timing import spread
from benchmarks.trainer import Trainer
from twell_jax.data.pipeline import training_dataset
from twell_jax.environment import describe_environment
from twell_jax.errors import UserError
from twell_jax.flops import peak_flops, train_flops_per_token
from twell_jax.training.flags import define_config_flag, parse_flags
from twell_jax.training.state import count_params

_ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds of both kinds of steps.", lower_bound=5)
_STEPS = flags.DEFINE_integer(
    "steps", 40, "Steps of a kind in a round; many more than are read ahead.", lower_bound=1
)
_PROFILE = flags.DEFINE_bool("profile", False, "Also profile the kernels of a few steps.")
_LABEL = flags.DEFINE_string("label", "", "What is measured, in a few words.")
_OUTPUT = flags.DEFINE_string(
    "output", "", "Write the row to this file, for `append`; by default to benchmarks/results."
)


def measure(config) -> dict:
    """The values of the row.

    Raises:
      FloatingPointError: a loss was not finite, so that the timing means nothing.
    """
    trainer = Trainer(config)
    batches = iter(
        training_dataset(
            config.data.path,
            sequence_length=config.data.sequence_length,
            batch_size=config.train.batch_size,
            seed=config.train.seed,
        )
    )

    def read():
        return jax.device_put(next(batches))

    constant = read()
    trainer.run(lambda: constant, 3)
    trainer.run(read, 3)
    trainer.host_seconds.clear()
    constant_seconds, fed_seconds = [], []
    for _ in range(_ROUNDS.value):
        constant_seconds += trainer.run(lambda: constant, _STEPS.value)
        trainer.host_seconds, kept = [], trainer.host_seconds
        fed_seconds += trainer.run(read, _STEPS.value)
        trainer.host_seconds = kept + trainer.host_seconds
    if not np.isfinite(trainer.losses).all():
        raise FloatingPointError(f"a loss was not finite: {trainer.losses}")

    median = np.median(fed_seconds)
    tokens = config.train.batch_size * config.data.sequence_length
    flops = train_flops_per_token(config.model, config.data.sequence_length) * tokens
    device = jax.devices()[0]
    peak = peak_flops(device.device_kind)
    memory = device.memory_stats() or {}
    values = {
        "constant_batch_ms": spread(constant_seconds),
        "fed_ms": spread(fed_seconds),
        "fed_over_constant": median / np.median(constant_seconds),
        "host_ms": spread(trainer.host_seconds),
        "tokens_per_second": tokens / median,
        "model_tflops_per_second": flops / median / 1e12,
        "mfu": flops / median / peak if peak else None,
        "peak_memory_bytes": memory.get("peak_bytes_in_use"),
        "num_params": count_params(trainer.state.params),
        "first_loss": trainer.losses[0],
        "last_loss": trainer.losses[-1],
    }
    if _PROFILE.value:
        values["profile"] = kernel_times(lambda: trainer.run(lambda: constant, 1), repeats=3)
    return values


def main(argv: list[str]) -> None:
    """Command line of `python -m benchmarks.train_step`."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    config = _CONFIG.value
    try:
        config.validate()
        values = measure(config)
    except (UserError, FloatingPointError) as error:
        sys.exit(f"train_step: {error}")
    print(json.dumps(values, indent=2))
    described = {
        "label": _LABEL.value,
        "model": vars(config.model),
        "sequence_length": config.data.sequence_length,
        "batch_size": config.train.batch_size,
        "micro_batch_size": config.train.micro_batch_size,
        "loss_chunk_tokens": config.train.loss_chunk_tokens,
    }
    row = {"environment": describe_environment(), "config": described, "values": values}
    if _OUTPUT.value:
        with open(_OUTPUT.value, "a") as file:
            file.write(json.dumps(row) + "\n")
    else:
        append_row("train_step", row["environment"], row["config"], row["values"])


if __name__ == "__main__":
    _CONFIG = define_config_flag("configs/small.py")
    app.run(main, flags_parser=parse_flags)
