"""What is checked and made ready before a run allocates anything."""

import pathlib
import tempfile

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import multihost_utils

from pallas_kernels import dispatch
from twell_jax.data import store
from twell_jax.data.preparation import PrepareOptions, prepare
from twell_jax.data.stdlib import stdlib_files
from twell_jax.errors import ConfigError, DataError
from twell_jax.modules import SparseFFN
from twell_jax.sharding import DATA, FSDP, TENSOR, make_mesh
from twell_jax.training.config import STDLIB, Config


def make_config_mesh(config: Config) -> jax.sharding.Mesh:
    """The mesh of all devices; ConfigError if they, or the sizes to split, do not divide."""
    shape = (config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    try:
        mesh = make_mesh(shape)
    except ValueError as error:
        raise ConfigError(f"--config.mesh: {error}") from None
    config.check_divides(mesh.shape)
    return mesh


def check_backend(config: Config, mesh: jax.sharding.Mesh) -> None:
    """Raises ConfigError if `ffn_backend` cannot serve this run's layers on this machine.

    Traces one layer, so that what "auto" chose is logged before any bar is on the screen.
    """
    model = config.model
    if model.ffn != "sparse":
        return
    micro_batch = config.train.batch_size // config.train.num_micro_batches

    def layer(x):
        return SparseFFN(
            model.hidden_size,
            model.intermediate_size,
            gated=model.gated,
            backend=model.ffn_backend,
            dtype=jnp.dtype(model.dtype),
            rngs=nnx.Rngs(0),
        )(x)

    shape = (micro_batch, config.data.sequence_length, model.hidden_size)
    try:
        with jax.set_mesh(mesh):
            jax.eval_shape(layer, jax.ShapeDtypeStruct(shape, model.dtype))
    except NotImplementedError as error:
        raise ConfigError(f"--config.model.ffn_backend={model.ffn_backend}: {error}") from None


def trains_by_kernels(config: Config, mesh: jax.sharding.Mesh) -> bool:
    """Whether this run's layers, as a device sees them, have kernels for the backward pass."""
    model = config.model
    if model.ffn != "sparse":
        return False
    examples = config.train.batch_size // config.train.num_micro_batches
    tokens = examples // (mesh.shape[DATA] * mesh.shape[FSDP]) * config.data.sequence_length
    x, w = (
        jax.ShapeDtypeStruct((rows, model.hidden_size), model.dtype)
        for rows in (tokens, model.intermediate_size // mesh.shape[TENSOR])
    )
    gate = w if model.gated else None
    return dispatch.trains_by_kernels("sparse_ffn", model.ffn_backend, x, gate, w, w, None)


def make_workdir(workdir: pathlib.Path) -> pathlib.Path:
    """Makes the folder if need be; ConfigError if it cannot be written."""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        # Better now than at the first checkpoint.
        tempfile.TemporaryFile(dir=workdir).close()
    except OSError as error:
        raise ConfigError(f"--workdir={workdir}: cannot write there: {error.strerror}") from None
    return workdir


def find_data(config: Config, workdir: pathlib.Path) -> str:
    """The prepared folder; makes that of the standard library if need be.

    Raises:
      ConfigError: the vocabulary of the data is larger than the model's.
      DataError: there is no prepared data, or none could be prepared.
    """
    data = config.data
    path = data.path
    if path == STDLIB:
        # Its name has all that it depends on: changed options do not find another's data.
        folder = workdir / "data" / f"stdlib_{data.stdlib_vocab_size}_{data.stdlib_max_bytes}"
        path = str(folder)
        if jax.process_index() == 0 and not folder.exists():
            options = PrepareOptions(
                inputs=stdlib_files(data.stdlib_max_bytes),
                vocab_size=data.stdlib_vocab_size,
                validation_fraction=0.02,
            )
            try:
                prepare(options, path)
            except (
                ValueError
            ) as error:  # too little text to hold some out, or to fill the vocabulary
                raise DataError(f"--config.data.stdlib_*: {error}") from None
        multihost_utils.sync_global_devices("data is prepared")
    vocab_size = store.read_manifest(path)["vocab_size"]
    if vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"--config.model.vocab_size: {config.model.vocab_size} is less than the {vocab_size} "
            f"tokens of the data in {path}"
        )
    return path
