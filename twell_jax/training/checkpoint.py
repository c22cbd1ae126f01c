"""Checkpoints: the whole state, the position in the data, and the configuration."""

import dataclasses
import pathlib

import orbax.checkpoint as ocp

from twell_jax.errors import ConfigError
from twell_jax.training.config import CheckpointConfig, Config
from twell_jax.training.state import TrainState

# Fields that a resumed run may change: they do not alter the training so far. (A new
# number of steps bends the rest of the learning-rate schedule.)
MAY_CHANGE = ("log.", "checkpoint.", "train.num_steps", "train.on_nonfinite")


class Checkpointer:
    """Saves and restores (state, data position) by step, in the background."""

    def __init__(self, folder: pathlib.Path, config: CheckpointConfig):
        """Creates `folder` if it does not exist."""
        self.folder = folder.resolve()
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(max_to_keep=config.keep),
            item_names=("state", "data", "config"),
        )

    def latest_step(self) -> int | None:
        """Step of the newest complete checkpoint, or None."""
        return self._manager.latest_step()

    def path(self, step: int) -> pathlib.Path:
        """Folder of the checkpoint of `step`."""
        return self.folder / str(step)

    def save(self, step: int, state: TrainState, data_state: dict, config: Config) -> None:
        """Saves, unless this step is saved already; returns when the arrays are copied."""
        if step in self._manager.all_steps():
            return
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(_as_dict(state)),
                data=ocp.args.JsonSave(data_state),
                config=ocp.args.JsonSave(dataclasses.asdict(config)),
            ),
        )

    def restore(self, step: int, abstract: TrainState, config: Config) -> tuple[TrainState, dict]:
        """(state, data position) of `step`.

        Raises:
          ConfigError: the checkpoint was made by a run that `config` does not continue.
        """
        saved = self._manager.restore(step, args=ocp.args.Composite(config=ocp.args.JsonRestore()))
        check_same_config(saved["config"], config)
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(_as_dict(abstract)), data=ocp.args.JsonRestore()
            ),
        )
        return TrainState(**restored["state"]), restored["data"]

    def wait(self) -> None:
        """Returns when every save is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and frees the manager's threads."""
        self._manager.close()


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
