r"""Trains a language model with sparse feed-forward layers.

  python train.py --config=configs/tiny.py --workdir=runs/tiny

trains a small model on the source of Python's standard library, on a CPU in a few
minutes. The same command again goes on from the last checkpoint, or says that the run is
finished. Any field of the configuration can be set on the command line:

  python train.py --config=configs/small.py --workdir=runs/books \
      --config.data.path=data/books --config.train.num_steps=2000 --config.l1.target_l0=30

All GPUs of a machine are used; --config.mesh says how. On several machines run the same
command on each, with --coordinator_address, --num_processes and --process_id, or with
--distributed where a cluster manager that JAX knows (Slurm, Open MPI, …) tells them.
"""

import signal
import sys

import jax
from absl import app, flags, logging

from twell_jax.console import console, quiet_libraries
from twell_jax.errors import UserError
from twell_jax.training.flags import define_config_flag, parse_flags
from twell_jax.training.loop import NonFiniteError, train
from twell_jax.training.signals import StoppedBySignalError

_CONFIG = define_config_flag("configs/tiny.py")
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder for checkpoints, metrics and plots; made if needed.", required=True
)
_DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "Join the other processes that the cluster manager started."
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator_address", "", "host:port of process 0, for a run of several processes."
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", 1, "Processes of the run.", lower_bound=1)
_PROCESS_ID = flags.DEFINE_integer("process_id", 0, "Number of this process.", lower_bound=0)


def main(argv: list[str]) -> None:
    """Command line of train.py."""
    logging.set_verbosity(logging.INFO)
    quiet_libraries()
    try:
        _check_flags(argv)
        _join_processes()
        train(_CONFIG.value, _WORKDIR.value)
    except (UserError, NonFiniteError, OSError) as error:
        sys.exit(f"train.py: {error}")
    except StoppedBySignalError as stopped:
        logging.info("%s", stopped)
        sys.exit(0 if stopped.signum == signal.SIGTERM else 128 + stopped.signum)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _check_flags(argv: list[str]) -> None:
    if len(argv) > 1:
        raise UserError(f"unknown arguments: {' '.join(argv[1:])}")
    if not _WORKDIR.value:
        raise UserError("--workdir: is empty; name a folder")
    if _NUM_PROCESSES.value > 1 and not _COORDINATOR.value:
        raise UserError("--num_processes needs --coordinator_address")
    if _PROCESS_ID.value >= _NUM_PROCESSES.value:
        raise UserError(
            f"--process_id: {_PROCESS_ID.value}; with --num_processes={_NUM_PROCESSES.value} it is "
            f"at most {_NUM_PROCESSES.value - 1}"
        )


def _join_processes() -> None:
    if _COORDINATOR.value:
        jax.distributed.initialize(_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
    elif _DISTRIBUTED.value:
        jax.distributed.initialize()
    if jax.process_index() != 0:
        console.quiet = True
        logging.set_verbosity(logging.WARNING)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
