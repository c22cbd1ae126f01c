"""How arrays are laid out over devices: the one table of rules, and what follows from it.

`python -m twell_jax.sharding` prints what they give for a configuration.

Axes of the mesh: examples of a batch are split over `data` and `fsdp` together, the
weights over `fsdp` (and gathered where they are used), hidden neurons, heads and the
vocabulary over `tensor`.
"""

import math
from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

DATA, FSDP, TENSOR = MESH_AXES = ("data", "fsdp", "tensor")

# Tokens are split over both; every device has its own.
TOKEN_AXES = (DATA, FSDP)

# Logical axis of an array -> axis of the mesh.
RULES = {
    "batch": TOKEN_AXES,
    "embed": FSDP,
    "neurons": TENSOR,
    "heads": TENSOR,
    "vocab": TENSOR,
    None: None,
}

# Logical axes of the arrays of the train state, by the last parts of their path.
# Anything else (norms, scalars) is on every device.
_LOGICAL_AXES = {
    ("embedding", "embedding"): ("vocab", "embed"),
    ("head",): ("vocab", "embed"),
    ("query", "kernel"): ("embed", "heads"),
    ("key", "kernel"): ("embed", "heads"),
    ("value", "kernel"): ("embed", "heads"),
    ("query", "bias"): ("heads",),
    ("key", "bias"): ("heads",),
    ("value", "bias"): ("heads",),
    ("out", "kernel"): ("heads", "embed"),
    ("w_gate",): ("neurons", "embed"),
    ("w_up",): ("neurons", "embed"),
    ("w_down",): ("neurons", "embed"),
    ("steps_since_fired",): (None, "neurons"),
    ("firing_rates",): (None, "neurons"),
}


def logical_axes(path) -> tuple[str | None, ...]:
    """Logical axes of the leaf at `path` (as of `jax.tree_util`); () if it is not split."""
    names = tuple(str(getattr(key, "key", getattr(key, "name", None))) for key in path)
    for length in (2, 1):
        if (axes := _LOGICAL_AXES.get(names[-length:])) is not None:
            return axes
    return ()


def make_mesh(
    shape: tuple[int, int, int],
    *,
    devices: Sequence[jax.Device] | None = None,
    abstract_devices: int | None = None,
) -> Mesh | AbstractMesh:
    """The mesh of `(data, fsdp, tensor)`.

    Args:
      shape: sizes of the axes; at most one may be -1, which fills what is left.
      devices: to use; by default all of all processes.
      abstract_devices: makes an abstract mesh of so many devices instead.

    Raises:
      ValueError: a size is neither -1 nor at least 1, two are -1, or they do not multiply to
        the number of devices.
    """
    sizes = ", ".join(f"{name}={size}" for name, size in zip(MESH_AXES, shape, strict=True))
    if any(size < 1 and size != -1 for size in shape) or shape.count(-1) > 1:
        raise ValueError(f"mesh: sizes must be at least 1, or one of them -1, got {sizes}")
    num_devices = abstract_devices or len(devices or jax.devices())
    fixed = math.prod(size for size in shape if size != -1)
    filled = tuple(num_devices // fixed if size == -1 else size for size in shape)
    if math.prod(filled) != num_devices:
        raise ValueError(f"mesh: {sizes} does not make {num_devices} devices")
    types = (AxisType.Auto,) * len(MESH_AXES)
    if abstract_devices is not None:
        return AbstractMesh(filled, MESH_AXES, axis_types=types)
    return jax.make_mesh(filled, MESH_AXES, axis_types=types, devices=devices)


def partition_spec(axes: tuple[str | None, ...]) -> P:
    """Where the rules put an array with these logical axes."""
    return P(*(RULES[axis] for axis in axes))


def shardings(mesh: Mesh, tree):
    """`NamedSharding` of every leaf of a train state, or a part of it."""
    return jax.tree.map_with_path(
        lambda path, leaf: NamedSharding(mesh, partition_spec(logical_axes(path))), tree
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of the arrays of a batch, `[batch, length]`."""
    return NamedSharding(mesh, partition_spec(("batch",)))


def batch_share(sharding: NamedSharding, batch_size: int) -> tuple[int, int]:
    """(number, count): this process reads part `number` of the `count` parts of every batch.

    Processes whose devices hold the same examples, as along a tensor axis that spans them,
    read the same part.

    Raises:
      ValueError: the examples of two processes overlap in part.
    """
    rows_of_process = {}
    for device, index in sharding.devices_indices_map((batch_size,)).items():
        rows = range(batch_size)[index[0]]
        rows_of_process.setdefault(device.process_index, set()).update(rows)
    parts = sorted({tuple(sorted(rows)) for rows in rows_of_process.values()})
    if sum(len(part) for part in parts) != batch_size:
        raise ValueError(
            "mesh: examples are not split evenly over processes; make data * fsdp a multiple of "
            f"their number or a divisor of it, got {dict(sharding.mesh.shape)} on "
            f"{len(rows_of_process)} processes"
        )
    mine = tuple(sorted(rows_of_process[jax.process_index()]))
    return parts.index(mine), len(parts)


def active_axes(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `axes` along which the mesh in use (`jax.set_mesh`) has several devices.

    Inside a `jax.shard_map` over an axis that axis is not there: each device sees its part.

    Raises:
      ValueError: one of them is Explicit, which the modules do not support.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    several = [axis for axis in axes if mesh.shape.get(axis, 1) > 1]
    for axis in several:
        if kinds[axis] == AxisType.Explicit:
            raise ValueError(
                f"mesh: axis {axis!r} is Explicit, the modules of twell_jax need Auto; make the "
                "mesh with twell_jax.sharding.make_mesh, or give jax.make_mesh "
                "axis_types=(jax.sharding.AxisType.Auto, ...)"
            )
    return tuple(axis for axis in several if kinds[axis] == AxisType.Auto)


def axis_size(axes: tuple[str, ...]) -> int:
    """Devices of the mesh in use along `axes` together."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(sizes[axis] for axis in axes)


def constrain_tokens(x: jax.Array) -> jax.Array:
    """Keeps the first axis of `x` split over the token axes of the mesh in use, if there is one."""
    axes = dividing_axes(TOKEN_AXES, x.shape[0])
    return jax.lax.with_sharding_constraint(x, P(axes)) if axes else x


def dividing_axes(axes: tuple[str, ...], size: int) -> tuple[str, ...]:
    """The active ones of `axes`, if together they divide `size`; else none."""
    axes = active_axes(axes)
    return axes if axes and size % axis_size(axes) == 0 else ()
