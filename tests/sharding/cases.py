"""Checks that need eight devices; `test_sharding` runs each in a process of its own.

python -m tests.sharding.cases NAME FOLDER
"""

import collections
import dataclasses
import os
import pathlib
import re
import sys

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from pallas_kernels import FfnPlan
from pallas_kernels.mosaic_gpu import ffn as mosaic_ffn
from pallas_kernels.triton_gpu import backward, launch
from pallas_kernels.triton_gpu import ffn as triton_ffn
from tests.kernels.cases import Case, make_inputs
from tests.kernels.truth import row_errors
from tests.training.helpers import make_config, write_data
from twell_jax.errors import ConfigError
from twell_jax.modules import SparseFFN
from twell_jax.modules.sharded_ffn import sharded_sparse_ffn
from twell_jax.sharding import batch_sharding, make_mesh, shardings
from twell_jax.training.loop import train
from twell_jax.training.metrics import read_metrics
from twell_jax.training.reorder import reorder_neurons
from twell_jax.training.revive import revive_dead_neurons
from twell_jax.training.state import abstract_state, initial_state
from twell_jax.training.step import make_train_step

# (data, fsdp, tensor), as the issue of every user starts: pure, then mixed.
MESHES = ((8, 1, 1), (1, 8, 1), (2, 4, 1), (4, 1, 2), (2, 2, 2), (1, 1, 4))


def sharded_config(data_path="nowhere"):
    """A model whose axes divide over every mesh."""
    config = make_config(data_path)
    config.model.vocab_size = 264
    config.model.num_heads = 4
    config.train.batch_size = 16
    config.train.z_loss = 1e-3
    return config


def make_batch():
    """16 examples of 16 tokens with padding of very different length."""
    rng = np.random.default_rng(0)
    shape = (16, 16)
    real = np.arange(16) < rng.integers(1, 17, (16, 1))
    return {
        "inputs": np.where(real, rng.integers(0, 259, shape), 0).astype(np.int32),
        "targets": np.where(real, rng.integers(0, 259, shape), 0).astype(np.int32),
        "segment_ids": real.astype(np.int32),
        "positions": np.where(real, np.arange(16), 0).astype(np.int32),
        "loss_mask": real,
    }


def auto_mesh(shape):
    """Of the first devices."""
    return make_mesh(shape, devices=jax.devices()[: int(np.prod(shape))])


def on_mesh(shape, config, function):
    """(fresh state, result of `function(state, batch)`, HLO) on a mesh of the first devices."""
    mesh = auto_mesh(shape)
    with jax.set_mesh(mesh):
        layout = shardings(mesh, abstract_state(config))
        state = initial_state(config, layout)
        batch = jax.device_put(make_batch(), batch_sharding(mesh))
        jitted = jax.jit(function, out_shardings=(layout, None))
        compiled = jitted.lower(state, batch).compile()
        return state, compiled(state, batch), compiled.as_text()


def relative_difference(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)


def assert_same_tree(actual, expected, limit):
    def check(path, a, b):
        assert relative_difference(a, b) <= limit, jax.tree_util.keystr(path)

    jax.tree.map_with_path(check, actual, expected)


def initial_parameters_are_the_same(_):
    config = sharded_config()
    expected = initial_state(config)
    for shape in (*MESHES, (1, 1, 1), (2, 1, 1), (1, 2, 1), (4, 1, 1)):
        state, _, _ = on_mesh(shape, config, lambda state, batch: (state, 0))
        jax.tree.map(
            np.testing.assert_array_equal,
            (state.params, state.opt_state, state.steps_since_fired),
            (expected.params, expected.opt_state, expected.steps_since_fired),
        )


def a_train_step_is_the_same_on_every_mesh(_):
    mixed = ((2, 2, 2),)
    for gated, micro_batch_size, meshes in ((True, 0, MESHES), (True, 8, mixed), (False, 0, mixed)):
        config = sharded_config()
        config.model.gated = gated
        config.train.micro_batch_size = micro_batch_size
        # Adam divides by the gradient's size: without this, updates of weights whose
        # gradient is rounding noise would be noise as large as any other.
        config.optimizer.eps = 1e-4
        step = make_train_step(config)
        expected_state, expected = jax.jit(step)(initial_state(config), make_batch())
        for shape in meshes:
            _, (state, metrics), hlo = on_mesh(shape, config, step)
            for name, value in expected.items():
                np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
            assert_same_tree(state.params, expected_state.params, 1e-5)
            assert_same_tree(state.opt_state[1].mu, expected_state.opt_state[1].mu, 1e-5)
            np.testing.assert_array_equal(state.steps_since_fired, expected_state.steps_since_fired)
            if gated and not micro_batch_size:
                check_collectives(shape, hlo)


def check_collectives(mesh, hlo):
    """Of the whole step: weights are gathered, activations are not."""
    kinds = collections.Counter(
        re.findall(r" (all-gather|all-reduce|all-to-all|reduce-scatter)(?:-start)?\(", hlo)
    )
    assert kinds["all-reduce"] > 0
    assert kinds["all-to-all"] == 0
    # Weights are gathered over fsdp, those of attention for the backward pass again; the embedding
    # table, for its lookup, over all axes (in both directions), and as the head.
    num_matrices = 2 * 7 + 2
    if mesh[1] > 1:
        assert num_matrices <= kinds["all-gather"] <= num_matrices + 2 * 4 + 4, kinds
        # Gradients of feed-forward layers, embedding and head are summed as they are split.
        assert kinds["reduce-scatter"] >= 2 * 3 + 1, kinds
    else:
        assert kinds["all-gather"] <= 2, kinds
    # Nothing with both a batch and a length axis is gathered: gathers are of matrices.
    for sizes in re.findall(r"= \(?\w+\[([\d,]*)\]\S* all-gather", hlo):
        assert len(sizes.split(",")) == 2, f"{mesh}: all-gather of [{sizes}]"


def reviving_is_the_same_on_every_mesh(_):
    config = sharded_config()
    config.train.dead_after_steps = 1

    def revive(state, _):
        state = dataclasses.replace(
            state,
            # Not zero, as after some steps.
            opt_state=jax.tree.map(lambda moment: moment + 1, state.opt_state),
            steps_since_fired=state.steps_since_fired.at[:, ::3].set(5),
        )
        return revive_dead_neurons(config, state)

    expected_state, expected = jax.jit(revive)(initial_state(config), make_batch())
    assert expected.sum() > 0
    for shape in MESHES:
        _, (state, revived), _ = on_mesh(shape, config, revive)
        np.testing.assert_array_equal(revived, expected)
        assert_same_tree(state.params, expected_state.params, 1e-6)
        assert_same_tree(state.opt_state[1].mu, expected_state.opt_state[1].mu, 1e-6)


def reordering_asks_no_other_device(_):
    """Neurons stay in their shard, and so do the rows that belong to them."""
    config = sharded_config()
    rng = np.random.default_rng(0)
    for shape in MESHES:
        shards = shape[2]
        width = config.model.intermediate_size // shards
        order = np.stack(
            [
                np.concatenate([first * width + rng.permutation(width) for first in range(shards)])
                for _ in range(config.model.num_layers)
            ]
        )

        def reorder(state, _, order=order, shards=shards):
            # Not all alike, as after some steps.
            state = dataclasses.replace(state, steps_since_fired=state.steps_since_fired + order)
            return reorder_neurons(state, order, shards), 0

        before, (state, _), hlo = on_mesh(shape, config, reorder)
        assert not re.findall(r"all-gather|all-to-all|collective-permute|all-reduce", hlo), shape
        for layer, block in state.params["blocks"].items():
            for name, rows in block["ffn"].items():
                expected = before.params["blocks"][layer]["ffn"][name][order[layer]]
                np.testing.assert_array_equal(rows, expected)
        expected = np.take_along_axis(order, order, axis=1)
        np.testing.assert_array_equal(state.steps_since_fired, expected)


def runs_continue_on_other_meshes(folder):
    """8 devices to 4 x 2, then to 1: same losses as a run on one mesh."""
    data = folder / "data"
    data.mkdir()
    write_data(data)
    config = sharded_config(data)
    config.train.num_steps = 12
    config.log.every_steps = 1
    train(config, folder / "whole")

    def leg(num_steps, mesh):
        part = dataclasses.replace(config, train=dataclasses.replace(config.train))
        part.train.num_steps = num_steps
        part.mesh = dataclasses.replace(config.mesh, **mesh)
        return part

    # The learning rate's schedule must be that of the whole run: interrupt, not shorten.
    from twell_jax.training.metrics import MetricsWriter

    write = MetricsWriter.write
    legs = (
        (4, {"data": 1, "fsdp": 8}),
        (8, {"data": 4, "fsdp": 1, "tensor": 2}),
        (12, {"data": 2, "fsdp": 4}),
    )
    for last, mesh in legs:

        def stop(self, step, kind, values, last=last):
            write(self, step, kind, values)
            if step == last + 1:
                raise KeyboardInterrupt

        MetricsWriter.write = stop
        try:
            train(leg(12, mesh), folder / "moved")
        except KeyboardInterrupt:
            pass
        finally:
            MetricsWriter.write = write

    def losses(name):
        rows = [row for row in read_metrics(folder / name) if row["kind"] == "train"]
        assert [row["step"] for row in rows] == list(range(1, 13))
        return [row["loss"] for row in rows]

    np.testing.assert_allclose(losses("moved"), losses("whole"), rtol=1e-4)


def what_does_not_divide_is_refused(folder):
    config = sharded_config()
    config.train.batch_size = 12
    with pytest.raises(ConfigError, match=r"train\.batch_size: 12 does not divide over the 8"):
        train(config, folder / "a")
    config = sharded_config()
    config.mesh.fsdp = 3
    with pytest.raises(ConfigError, match="mesh: data=-1, fsdp=3, tensor=1 does not make 8"):
        train(config, folder / "b")
    config = sharded_config()
    config.mesh.tensor = 8
    with pytest.raises(ConfigError, match=r"model\.num_kv_heads: 4 does not divide over the 8"):
        train(config, folder / "c")
    assert not list(folder.iterdir())


def sums_over_devices_are_made_in_f32(_):
    """With bf16 parts: rounded before the sum, a gradient would lose a bit a doubling."""
    config = sharded_config()
    config.model.dtype = "bfloat16"
    step = make_train_step(config)
    for shape in ((8, 1, 1), (1, 8, 1), (2, 2, 2)):
        mesh = auto_mesh(shape)
        with jax.set_mesh(mesh):
            layout = shardings(mesh, abstract_state(config))
            batch = jax.device_put(make_batch(), batch_sharding(mesh))
            lowered = jax.jit(step, out_shardings=(layout, None)).lower(
                initial_state(config, layout), batch
            )
        # What XLA is given, before it may widen a sum by itself, as it does on CPUs.
        sums = re.findall(r"\"?stablehlo.all_reduce.*?\) : \((.*?)\) ->", lowered.as_text(), re.S)
        assert len(sums) >= 3 * config.model.num_layers
        assert not [kind for kind in sums if "bf16" in kind], sums


def weights_travel_in_the_narrow_dtype(_):
    """Over fsdp those of feed-forward layers and the table are gathered as bf16, not as f32."""
    config = sharded_config()
    config.model.dtype = "bfloat16"
    mesh = auto_mesh((1, 8, 1))
    with jax.set_mesh(mesh):
        layout = shardings(mesh, abstract_state(config))
        batch = jax.device_put(make_batch(), batch_sharding(mesh))
        lowered = jax.jit(make_train_step(config), out_shardings=(layout, None)).lower(
            initial_state(config, layout), batch
        )
    # What XLA is given, before it may widen them, as it does on CPUs.
    gathered = re.findall(r"stablehlo.all_gather.*? : \((.*?)\) ->", lowered.as_text(), re.S)
    assert len(gathered) >= 3 * config.model.num_layers + 2
    assert not [kind for kind in gathered if "bf16" not in kind], gathered


def modules_work_inside_a_shard_map_of_the_user(_):
    """A layer on each device's own tokens, as in someone's data-parallel loop."""
    layer = SparseFFN(32, 64, dtype=jax.numpy.float32, backend="reference", rngs=nnx.Rngs(0))
    graph, params = nnx.split(layer)
    x = jax.random.normal(jax.random.key(0), (16, 4, 32))

    def loss(params, x):
        y, stats = nnx.merge(graph, params)(x)
        return jax.numpy.sum(y**2) + stats.l1

    expected_loss, expected = jax.value_and_grad(
        lambda p: sum(loss(p, part) for part in np.split(np.asarray(x), 8))
    )(params)
    mesh = auto_mesh((8, 1, 1))

    def on_device(params, x):
        params = jax.lax.pcast(params, ("data",), to="varying")
        value, gradient = jax.value_and_grad(loss)(params, x)
        return jax.lax.psum((value, gradient), "data")

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(on_device, in_specs=(P(), P("data")), out_specs=P())
        value, gradient = jax.jit(mapped)(params, x)
    np.testing.assert_allclose(value, expected_loss, rtol=1e-5)
    assert_same_tree(gradient, expected, 1e-5)


def sharded_layer():
    """Arguments, and `differentiated(backend)`, of a layer that is sparse enough.

    With a dense band, on every shard of its neurons.
    """
    inputs = make_inputs(Case((16, 2), 64, 256, 0.003, "bfloat16", mask="random"))

    def differentiated(backend):
        def loss(*arguments):
            y, stats = sharded_sparse_ffn(
                *arguments, inputs.token_mask, backend=backend, plan=FfnPlan(40)
            )
            sum_of_y = jax.numpy.sum(y.astype(jax.numpy.float32) * inputs.y_bar)
            return sum_of_y + inputs.l1_bar * stats.l1, (y, stats)

        return jax.jit(jax.value_and_grad(loss, range(4), has_aux=True))

    return (inputs.x, inputs.w_gate, inputs.w_up, inputs.w_down), differentiated


def every_backend_stands_in_a_shard_map(_):
    """Traced, with its gradient, as if the GPU were there; Mosaic's kernels are lowered, too."""
    for module in (mosaic_ffn, triton_ffn):
        module.require_hopper = lambda *_: None
    triton_ffn.require_triton = lambda _: None
    arguments, differentiated = sharded_layer()
    for backend in ("mosaic_gpu", "mosaic_triton", "triton"):
        for shape in ((8, 1, 1), (2, 2, 2)):
            with jax.set_mesh(auto_mesh(shape)):
                traced = differentiated(backend).trace(*arguments)
                assert ("kernel" in str(traced.jaxpr)) or backend == "mosaic_gpu"
                if backend == "mosaic_gpu":
                    forward = jax.jit(lambda *a: sharded_sparse_ffn(*a, None, backend="mosaic_gpu"))
                    lowered = forward.trace(*arguments).lower(lowering_platforms=("cuda",))
                    assert "mosaic_gpu" in lowered.as_text()


def sparse_kernels_give_the_same_on_every_mesh(_):
    """Interpreted: each device packs its tokens and neurons, forward and backward."""
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.kernels import triton_interpreted

    for module in (launch, backward):
        module.call = triton_interpreted.call
    triton_ffn.require_triton = lambda _: None

    arguments, differentiated = sharded_layer()

    def outputs(backend):
        (_, aux), gradients = differentiated(backend)(*arguments)
        return *aux, gradients

    expected_y, expected, expected_gradients = outputs("reference")
    for shape in ((8, 1, 1), (2, 2, 2)):
        with jax.set_mesh(auto_mesh(shape)):
            y, stats, gradients = outputs("triton")
        np.testing.assert_array_equal(stats.fired, expected.fired)
        assert int(stats.fired.sum()) > 0
        assert int(stats.num_dense) == 0
        np.testing.assert_allclose(stats.l1, expected.l1, rtol=2**-8)
        for actual, right in zip((y, *gradients), (expected_y, *expected_gradients), strict=True):
            assert row_errors(actual, np.asarray(right, np.float32)).max() <= 2**-7


def wrong_meshes_and_shapes_are_named(_):
    layer = SparseFFN(32, 60, backend="reference", rngs=nnx.Rngs(0))
    x = np.zeros((16, 4, 32), np.float32)
    explicit = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with (
        jax.set_mesh(explicit),
        pytest.raises(ValueError, match="axis 'data' is Explicit"),
    ):
        layer(x)
    with (
        jax.set_mesh(auto_mesh((1, 1, 8))),
        pytest.raises(ValueError, match="w_up: 60 neurons do not divide over the 8 devices"),
    ):
        layer(x)
    with (
        jax.set_mesh(auto_mesh((2, 2, 2))),
        pytest.raises(ValueError, match="has 32 columns, but the last axis of x has 31"),
    ):
        layer(x[..., 1:])
    for shape in ((0, 1, 1), (-1, -1, 1), (-2, 1, 1)):
        with pytest.raises(ValueError, match="sizes must be at least 1, or one of them -1"):
            make_mesh(shape)


CASES = {
    case.__name__: case
    for case in (
        initial_parameters_are_the_same,
        a_train_step_is_the_same_on_every_mesh,
        reviving_is_the_same_on_every_mesh,
        reordering_asks_no_other_device,
        runs_continue_on_other_meshes,
        what_does_not_divide_is_refused,
        sums_over_devices_are_made_in_f32,
        weights_travel_in_the_narrow_dtype,
        modules_work_inside_a_shard_map_of_the_user,
        every_backend_stands_in_a_shard_map,
        sparse_kernels_give_the_same_on_every_mesh,
        wrong_meshes_and_shapes_are_named,
    )
}

if __name__ == "__main__":
    jax.config.update("jax_default_matmul_precision", "highest")
    CASES[sys.argv[1]](pathlib.Path(sys.argv[2]))
