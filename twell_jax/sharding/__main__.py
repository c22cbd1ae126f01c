r"""Prints how the train state of a configuration is laid out over devices; needs none of them.

  python -m twell_jax.sharding --config=configs/paper_2b.py --num_devices=8 \
      --config.mesh.fsdp=4 --config.mesh.tensor=2
"""

import math
import sys

import jax
import rich.table
from absl import app, flags

from twell_jax.console import console
from twell_jax.errors import UserError
from twell_jax.sharding import logical_axes, make_mesh, partition_spec
from twell_jax.training.config import Config
from twell_jax.training.flags import define_config_flag, parse_flags
from twell_jax.training.state import abstract_state


def layout_table(config: Config, num_devices: int) -> rich.table.Table:
    """A row for every array of the train state, and the bytes that a device holds of all.

    Raises:
      ConfigError: something does not divide over the mesh.
      ValueError: the mesh does not fit the number of devices.
    """
    shape = (config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    mesh = make_mesh(shape, abstract_devices=num_devices)
    config.check_divides(mesh.shape)
    sizes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    table = rich.table.Table(title=f"{num_devices} devices: {sizes}")
    table.add_column("array", overflow="fold")
    for heading in ("shape", "split over", "on a device"):
        table.add_column(heading)
    table.add_column("MiB", justify="right")
    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_state(config)):
        spec = partition_spec(logical_axes(path))
        local = jax.sharding.NamedSharding(mesh, spec).shard_shape(leaf.shape)
        size = math.prod(local) * leaf.dtype.itemsize
        total += size
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        split = ", ".join(str(axis) for axis in spec) or "nothing"
        table.add_row(name, str(leaf.shape), split, str(local), f"{size / 2**20:.2f}")
    table.add_section()
    table.add_row("all", "", "", "", f"{total / 2**20:,.2f}")
    return table


def main(argv: list[str]) -> None:
    """Command line of `python -m twell_jax.sharding`."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    config = _CONFIG.value
    try:
        config.validate()
        console.print(layout_table(config, _NUM_DEVICES.value))
    except (UserError, ValueError) as error:
        sys.exit(f"sharding: {error}")


if __name__ == "__main__":
    _CONFIG = define_config_flag("configs/tiny.py")
    _NUM_DEVICES = flags.DEFINE_integer("num_devices", 8, "Devices to lay out over.", lower_bound=1)
    app.run(main, flags_parser=parse_flags)
