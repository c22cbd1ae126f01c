"""Checkpoints: the whole state, the position in the data, the plans, and the configuration.

Orbax writes a checkpoint in the background and renames it into place when it is complete,
so that a half-written one is never seen. When it is in place it is sealed with the
checksums of its files; one that does not match its seal, or cannot be read, is damaged:
it is moved aside and the one before is used.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import threading
import zlib

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from jax.experimental import multihost_utils

from twell_jax.errors import ConfigError, UserError
from twell_jax.training.config import CheckpointConfig, Config
from twell_jax.training.state import TrainState

# Fields that a resumed run may change: they do not alter the training so far. (A new
# number of steps bends the rest of the learning-rate schedule.)
MAY_CHANGE = (
    "data.path",  # the data itself is compared by its fingerprint
    "log.",
    "checkpoint.",
    "mesh.",
    "model.attention",
    "model.ffn_backend",
    "model.remat",
    "plan.",
    "train.max_skipped_in_a_row",
    "train.micro_batch_size",
    "train.num_steps",
    "train.on_nonfinite",
)

_SEAL = "checksums.json"
_DAMAGED = "damaged"


class CheckpointError(UserError):
    """No checkpoint can be read, or one could not be written."""


class Checkpointer:
    """Saves and restores (state, data position) by step, in the background."""

    def __init__(self, folder: pathlib.Path, config: CheckpointConfig, data_fingerprint: str):
        """Creates `folder` if it does not exist.

        `data_fingerprint` says which data the run trains on, see `store.fingerprint`.
        """
        self.folder = folder.resolve()
        self._data_fingerprint = data_fingerprint
        self._keep = config.keep
        self._manager = self._new_manager()
        self._sealing: threading.Thread | None = None

    def _new_manager(self) -> ocp.CheckpointManager:
        return ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(max_to_keep=self._keep),
            item_names=("state", "data", "plans", "config"),
        )

    def latest_step(self) -> int | None:
        """Step of the newest complete checkpoint, or None."""
        return self._manager.latest_step()

    def path(self, step: int) -> pathlib.Path:
        """Folder of the checkpoint of `step`."""
        return self.folder / str(step)

    def save(
        self, step: int, state: TrainState, data_state: dict, plans: dict | None, config: Config
    ) -> None:
        """Saves, unless this step is saved already; returns when the arrays are copied.

        `plans` are those of `Planner.state`, None without a planner.

        Raises:
          CheckpointError: it, or the one before, could not be written.
        """
        if step in self._manager.all_steps():
            return
        self._join_sealing()
        with self._explain_failure():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(_as_dict(state)),
                    data=ocp.args.JsonSave(
                        {"position": data_state, "fingerprint": self._data_fingerprint}
                    ),
                    plans=ocp.args.JsonSave({"planner": plans}),
                    config=ocp.args.JsonSave(dataclasses.asdict(config)),
                ),
            )
        if jax.process_index() == 0:
            self._sealing = threading.Thread(target=self._seal, args=(step,))
            self._sealing.start()

    def restore_latest(
        self, abstract: TrainState, config: Config
    ) -> tuple[TrainState, dict, dict | None, int] | None:
        """(state, data position, plans, step) of the newest whole checkpoint; None without any.

        Args:
          abstract: shapes, dtypes and shardings of the state.
          config: of the run that wants to go on.

        Raises:
          ConfigError: the checkpoint was made by a run that `config` does not continue, or on
            other data.
          CheckpointError: all checkpoints are damaged.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        for step in steps:
            restored, damage = None, self._broken_seal(step)
            if not _any_process(bool(damage)):
                try:
                    restored = self._restore(step, abstract, config)
                except (ConfigError, MemoryError, jax.errors.JaxRuntimeError):
                    raise  # not the fault of the files
                except Exception as error:  # Orbax and TensorStore raise many kinds
                    damage = f"{type(error).__name__}: {error}"
            # One process that cannot read it speaks for all: they must go on from the same step.
            if _any_process(bool(damage)):
                damage = damage or "another process cannot read it"
                logging.warning("checkpoint %s is damaged: %s", self.path(step), damage)
                continue
            self._move_aside([damaged for damaged in steps if damaged > step])
            return *restored, step
        if steps:
            raise CheckpointError(
                f"none of the checkpoints {steps} in {self.folder} can be read; the warnings "
                "above say why. Use another --workdir to start anew"
            )
        return None

    def _restore(self, step, abstract, config) -> tuple[TrainState, dict, dict | None]:
        saved = self._manager.restore(step, args=ocp.args.Composite(config=ocp.args.JsonRestore()))
        check_same_config(saved["config"], config)
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(_as_dict(abstract)),
                data=ocp.args.JsonRestore(),
                plans=ocp.args.JsonRestore(),
            ),
        )
        if restored["data"]["fingerprint"] != self._data_fingerprint:
            raise ConfigError(
                f"--config.data.path: the data in {config.data.path} is not the data that the "
                f"run in {self.folder.parent} was trained on; its folder may move, but not "
                "change. Use another --workdir for a new run"
            )
        return (
            TrainState(**restored["state"]),
            restored["data"]["position"],
            restored["plans"]["planner"],
        )

    def wait(self) -> None:
        """Returns when every save is on disk.

        Raises:
          CheckpointError: one could not be written.
        """
        with self._explain_failure():
            self._manager.wait_until_finished()
        self._join_sealing()

    @contextlib.contextmanager
    def _explain_failure(self):
        try:
            yield
        except Exception as error:  # Orbax and TensorStore raise many kinds
            saved = self._manager.all_steps()
            last = f"that of step {max(saved)}" if saved else "none"
            raise CheckpointError(
                f"a checkpoint could not be written to {self.folder}; the last whole one there "
                # Whole: TensorStore names many paths first, and the cause last.
                f"is {last}. {str(error).splitlines()[0]}"
            ) from error

    def close(self) -> None:
        """Waits, and frees the manager's threads."""
        self._manager.close()
        self._join_sealing()

    def _join_sealing(self) -> None:
        if self._sealing is not None:
            self._sealing.join()
            self._sealing = None

    def _seal(self, step: int) -> None:
        try:
            self._manager.wait_until_finished()
            folder = self.path(step)
            partial = folder / f"{_SEAL}.partial"
            partial.write_text(json.dumps(_checksums(folder)))
            os.replace(partial, folder / _SEAL)
        except Exception as error:  # the save itself failed, or its folder is gone: see `wait`
            logging.warning("checkpoint of step %d could not be sealed: %s", step, error)

    def _broken_seal(self, step: int) -> str:
        """What is wrong if files differ from the seal, else "". Without one, Orbax is trusted:
        the process ended between the checkpoint and its seal. Process 0 looks for all."""
        if jax.process_index() != 0:
            return ""
        seal = self.path(step) / _SEAL
        try:
            if seal.is_file() and json.loads(seal.read_text()) != _checksums(self.path(step)):
                return "its files do not match their checksums"
        except (OSError, ValueError) as error:
            return f"its checksums cannot be read: {error}"
        return ""

    def _move_aside(self, steps: list[int]) -> None:
        """Frees the names of damaged checkpoints, and keeps what is in them."""
        if not steps:
            return
        if jax.process_index() == 0:
            for step in steps:
                target = self.folder.with_name(f"{self.folder.name}-{_DAMAGED}")
                target.mkdir(exist_ok=True)
                number = sum(1 for _ in target.iterdir())
                self.path(step).rename(target / f"{step}-{number}")
        self._manager.close()
        self._manager = self._new_manager()


def _any_process(condition: bool) -> bool:
    if jax.process_count() == 1:
        return condition
    return bool(np.any(multihost_utils.process_allgather(np.bool_(condition))))


def _checksums(folder: pathlib.Path) -> dict[str, int]:
    """CRC-32 by name of every file below a folder but its seal."""
    sums = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith(_SEAL):
            value = 0
            with path.open("rb") as file:
                while chunk := file.read(1 << 22):
                    value = zlib.crc32(chunk, value)
            sums[str(path.relative_to(folder))] = value
    return sums


def _as_dict(state: TrainState) -> dict:
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}


def check_same_config(saved: dict, config: Config) -> None:
    """Raises ConfigError, showing the differences, if `config` trains differently."""
    before, now = _flatten(saved), _flatten(dataclasses.asdict(config))
    changed = [
        f"  --config.{name}: {before.get(name, 'not there')} in the checkpoint, "
        f"{now.get(name, 'not there')} now"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name) and not name.startswith(MAY_CHANGE)
    ]
    if changed:
        raise ConfigError(
            "the configuration differs from that of the checkpoint:\n"
            + "\n".join(changed)
            + f"\nOnly {', '.join(MAY_CHANGE)} may change; use another --workdir for a new run"
        )


def _flatten(config: dict, prefix: str = "") -> dict:
    flat = {}
    for name, value in config.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
