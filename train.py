r"""Trains a language model with sparse feed-forward layers.

  python train.py --config=configs/tiny.py --workdir=runs/tiny

trains a small model on the source of Python's standard library, on a CPU in a few
minutes. The same command again goes on from the last checkpoint, or says that the run is
finished. Any field of the configuration can be set on the command line:

  python train.py --config=configs/small.py --workdir=runs/books \
      --config.data.path=data/books --config.train.num_steps=2000 --config.l1.target_l0=30
"""

import sys

from absl import app, flags, logging

from twell_jax.console import quiet_libraries
from twell_jax.errors import UserError
from twell_jax.training.flags import define_config_flag, parse_flags
from twell_jax.training.loop import NonFiniteError, train

_CONFIG = define_config_flag("configs/tiny.py")
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder for checkpoints, metrics and plots; made if needed.", required=True
)


def main(argv: list[str]) -> None:
    """Command line of train.py."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    logging.set_verbosity(logging.INFO)
    quiet_libraries()
    try:
        train(_CONFIG.value, _WORKDIR.value)
    except (UserError, NonFiniteError) as error:
        sys.exit(f"train.py: {error}")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
