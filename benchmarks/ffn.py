r"""Times a feed-forward layer, dense and sparse, and the parts of the latter.

  python -m benchmarks.ffn --tokens=32768 --active=7,29 --rates=uniform
  python -m benchmarks.ffn --density=0.001,0.01,0.1 --pass=train --backend=mosaic_triton

Outputs, with --pass=train all gradients too, are compared with f32 first, row by row, after 2 GiB
of memory full of NaN were freed. Then everything is timed in turn, several rounds. Dense is the
faster of three XLA matmuls and of two, with gate and up merged. Writes one row for each case.
"""

import dataclasses
import functools
import itertools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks.ffn_layers import PASSES, compare, layers_of
from benchmarks.ffn_truth import DisagreementError
from benchmarks.results import append_row
from benchmarks.timing import time_in_turn
from benchmarks.workload import RATES, firing_rates, make_layer
from pallas_kernels import BACKENDS, FfnPlan
from pallas_kernels.mosaic_gpu import consumer, gate
from pallas_kernels.packed_ffn import FfnConfig, list_capacity
from pallas_kernels.triton_gpu import backward, launch
from twell_jax.environment import describe_environment
from twell_jax.flops import peak_flops
from twell_jax.planning import (
    FORWARD_COSTS,
    TRAINING_COSTS,
    best_plan,
    neuron_order,
    predicted_ns,
)

_HIDDEN_SIZE = flags.DEFINE_list("hidden_size", ["2048"], "Width D; several in turn.")
_INTERMEDIATE_SIZE = flags.DEFINE_list(
    "intermediate_size", ["5632"], "Number H of hidden neurons; several in turn."
)
_TOKENS = flags.DEFINE_list("tokens", ["32768"], "Number M of tokens; several in turn.")
_ACTIVE = flags.DEFINE_list("active", ["29"], "Mean active neurons of a token; several in turn.")
_DENSITY = flags.DEFINE_list(
    "density", [], "Instead of --active: the active share of the neurons, 0 to 1; several in turn."
)
_RATES = flags.DEFINE_enum("rates", "uniform", RATES, "How unevenly neurons fire.")
_RATES_FILE = flags.DEFINE_string("rates_file", "", "For --rates=file: an .npz with 'rates'.")
_LAYER = flags.DEFINE_list(
    "layer", ["0"], "For --rates=file: which layer's rates; several in turn."
)
_DENSE_BAND = flags.DEFINE_list(
    "dense_band",
    ["0"],
    "Neurons in the dense band of the plan, the busiest ones; auto takes those that the cost "
    "model takes; several in turn.",
)
_SKIP_SILENT = flags.DEFINE_bool("skip_silent", False, "Leave out neurons whose rate is 0.")
_PASS = flags.DEFINE_enum(
    "pass", "forward", PASSES, "What is timed; train is the forward and the backward pass."
)
_BACKEND = flags.DEFINE_enum("backend", "mosaic_gpu", BACKENDS, "Backend of sparse_ffn.")
_PARTS = flags.DEFINE_bool(
    "parts", True, "Also time the parts (GPU backends, all neurons in the sparse band)."
)
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Rounds of all in turn.", lower_bound=5)
_REPEATS = flags.DEFINE_integer("repeats", 10, "Calls of each in a round.", lower_bound=1)
_OUTPUT = flags.DEFINE_string(
    "output", "", "Write rows to this file, for `append`; by default to benchmarks/results."
)

# Rate at which rows come from the L2 cache of an H200, as measured for random rows of 4 KiB.
_L2_BYTES_PER_SECOND = 8e12


def parts_of(layer, backend: str) -> dict:
    """The kernels alone, and XLA's relu(gate matmul): functions without arguments."""
    x, w_gate, w_up, w_down = layer
    config = gate.GateConfig()
    if backend == "triton":
        pack = jax.jit(lambda x, w: launch.pack_words(x, w, None, config=launch.PackConfig()))
    else:
        pack = jax.jit(lambda x, w: gate.gate_words(x, w, None, config=config))
    words, _ = pack(x, w_gate)
    matmul = jax.jit(lambda x, w: jax.nn.relu(x @ w.T))
    counts = jnp.sum(matmul(x, w_gate) != 0, axis=1)
    if not bool(jnp.all(jnp.abs(counts - jnp.sum(words[:, :, 0], axis=1)) <= 2)):
        raise DisagreementError("the packed counts differ from those of the matmul")
    parts = {"gate_pack": lambda: pack(x, w_gate), "xla_relu_gate": lambda: matmul(x, w_gate)}
    if backend == "mosaic_gpu":
        consumer_config = consumer.default_config(x.shape[1], words.shape[1], config.slots)
        up_down = jax.jit(functools.partial(consumer.up_down, config=consumer_config))
        return parts | {"consumer": lambda: up_down(words, x, w_up, w_down, None)}
    # As many of them as `sparse_ffn` would take.
    capacity = list_capacity(len(x), len(w_gate), FfnConfig())
    overflowed = jnp.any(words[:, :, 0] > config.slots, axis=1)
    lengths = jnp.where(overflowed, 0, jnp.sum(words[:, :, 0], axis=1))
    if int(jnp.sum(lengths)) > capacity:
        return parts
    make_lists, up_down = jax.jit(launch.make_lists, static_argnums=2), jax.jit(launch.up_down)
    lists = make_lists(words, lengths, capacity)
    parts |= {
        "lists": lambda: make_lists(words, lengths, capacity),
        "consumer": lambda: up_down(lists, x, w_up, w_down, None),
    }
    if _PASS.value == "train":
        regroup = jax.jit(backward.regroup, static_argnums=1)
        parts["regroup"] = lambda: regroup(lists, len(w_up))
    return parts


def floors_of(tokens, size, neurons, dense_band, pairs, peak, differentiate: bool) -> dict:
    """The least time of the parts in ms.

    FLOPs of the gate of all `neurons`, and of the rest of the dense band; and, of the `pairs` of
    the sparse band, bytes of rows from the L2.
    """
    # Rows of w_up and w_down; then of all weights for dx, and of x and y_bar for theirs.
    bytes_of = {"consumer_ms": 4 * size}
    if differentiate:
        bytes_of |= {"token_gradients_ms": 6 * size, "weight_gradients_ms": 4 * size}
    rates = {name: 1e3 * pairs * size / _L2_BYTES_PER_SECOND for name, size in bytes_of.items()}
    products = neurons + (8 if differentiate else 2) * dense_band
    return {"matmuls_ms": 1e3 * 2 * tokens * size * products / peak, **rates}


def plan_of(rates, size: int, dense_band: int | str) -> tuple[FfnPlan, float]:
    """The plan of the flags, and its predicted time in ns a token."""
    costs = TRAINING_COSTS if _PASS.value == "train" else FORWARD_COSTS
    plan = best_plan(rates, size, costs, skip_silent=_SKIP_SILENT.value)
    if dense_band != "auto":
        plan = dataclasses.replace(plan, dense_band=dense_band)
    plan.check(len(rates))
    return plan, predicted_ns(rates[neuron_order(rates, plan)], plan, size, costs)


def measure(
    tokens: int, size: int, neurons: int, layer_number: int, active: float, dense_band: int | str
) -> tuple[dict, dict]:
    """(config, values) of a row."""
    differentiate = _PASS.value == "train"
    rates = firing_rates(_RATES.value, neurons, active, file=_RATES_FILE.value, layer=layer_number)
    plan, predicted = plan_of(rates, size, dense_band)
    layers = layers_of(_BACKEND.value, _PASS.value, plan)
    # A backend that cannot serve this says so before anything is made or timed.
    shapes = [jax.ShapeDtypeStruct((rows, size), jnp.bfloat16) for rows in (tokens, *3 * [neurons])]
    jax.eval_shape(layers.sparse, *shapes, *(shapes[:1] if differentiate else ()))
    layer = make_layer(tokens, size, rates[neuron_order(rates, plan)])
    y_bar = ()
    if differentiate:
        y_bar = (jax.random.normal(jax.random.key(1), (tokens, size), jnp.bfloat16),)
    values = compare(layers, layer, *y_bar)
    x, w_gate, w_up, w_down = layer
    w_both = jnp.concatenate([w_gate, w_up])
    functions = {
        "dense_separate": lambda: layers.separate(*layer, *y_bar),
        "dense_merged": lambda: layers.merged(x, w_both, w_down, *y_bar),
        "sparse": lambda: layers.sparse(*layer, *y_bar),
    }
    if _PARTS.value and plan == FfnPlan() and _BACKEND.value not in ("auto", "reference"):
        functions |= parts_of(layer, _BACKEND.value)
        if differentiate:
            sparse_forward = layers_of(_BACKEND.value, "forward").sparse
            functions["forward"] = lambda: sparse_forward(*layer)
    times = time_in_turn(functions, rounds=_ROUNDS.value, repeats=_REPEATS.value)
    fastest = min(("dense_separate", "dense_merged"), key=lambda name: times[name]["median"])
    values |= {"dense": fastest, "dense_ms": times[fastest], "sparse_ms": times["sparse"]}
    values["ratio"] = times[fastest]["median"] / times["sparse"]["median"]
    # None if the plan is one that the planner would not take.
    values["predicted_ms"] = predicted * tokens / 1e6 if np.isfinite(predicted) else None
    values["parts_ms"] = {n: t for n, t in times.items() if n not in (fastest, "sparse")}
    pairs = values["active"] * tokens
    if "consumer" in times:
        seconds = times["consumer"]["median"] / 1e3
        values["consumer_bytes_per_second"] = pairs * 4 * size / seconds
    flops = (3 if differentiate else 1) * 6 * tokens * size * neurons
    values["dense_tflops_per_second"] = flops / times[fastest]["median"] / 1e9
    peak = peak_flops(jax.devices()[0].device_kind)
    if peak:
        values["floor"] = floors_of(
            tokens,
            size,
            neurons - plan.silent_band,
            plan.dense_band,
            pairs - tokens * float(np.sum(rates[neuron_order(rates, plan)][: plan.dense_band])),
            peak,
            differentiate,
        )
        values["floor_ratio"] = times["sparse"]["median"] / sum(values["floor"].values())
    config = {
        "hidden_size": size,
        "intermediate_size": neurons,
        "tokens": tokens,
        "active": active,
        "rates": _RATES.value,
        "backend": _BACKEND.value,
        "plan": dataclasses.asdict(plan),
    }
    if _RATES.value == "file":
        config["layer"] = layer_number
    return config, values


def cases_of_flags() -> list[tuple]:
    """Arguments of `measure`."""
    numbers = {}
    for flag, kind in (
        (_TOKENS, int),
        (_HIDDEN_SIZE, int),
        (_INTERMEDIATE_SIZE, int),
        (_LAYER, int),
        (_ACTIVE, float),
        (_DENSITY, float),
        (_DENSE_BAND, lambda value: value if value == "auto" else int(value)),
    ):
        try:
            numbers[flag.name] = [kind(value) for value in flag.value]
        except ValueError:
            raise app.UsageError(f"--{flag.name}: not a list of numbers: {flag.value}") from None
    densities = numbers.pop("density")
    if not all(0 < density < 1 for density in densities):
        raise app.UsageError(f"--density: must be above 0 and below 1, got {densities}")
    actives, dense_bands = numbers.pop("active"), numbers.pop("dense_band")
    return [
        (*sizes, active, dense_band)
        for sizes in itertools.product(*numbers.values())
        for active in ([density * sizes[2] for density in densities] or actives)
        for dense_band in dense_bands
    ]


def main(argv: list[str]) -> None:
    """Command line of `python -m benchmarks.ffn`."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    environment = describe_environment()
    name = f"ffn.{_PASS.value}"
    for case in cases_of_flags():
        try:
            config, values = measure(*case)
        except (DisagreementError, NotImplementedError, ValueError) as error:
            sys.exit(f"ffn: {error}")
        parts = "  ".join(f"{n} {t['median']:.3f}" for n, t in values["parts_ms"].items())
        dense, sparse = values["dense_ms"]["median"], values["sparse_ms"]["median"]
        predicted = values["predicted_ms"] or float("nan")
        print(
            f"M {config['tokens']} D {config['hidden_size']} H {config['intermediate_size']} "
            f"{config['rates']} bands {tuple(config['plan'].values())} {_PASS.value} "
            f"active {values['active']:.1f}: {values['dense']} {dense:.3f} ms, "
            f"sparse {sparse:.3f} ms (predicted {predicted:.3f}), ratio {values['ratio']:.2f}, "
            f"row error {values['max_row_error']:.2e} "
            f"(dense {values['dense_max_row_error']:.2e})  {parts}",
            flush=True,
        )
        if _OUTPUT.value:
            row = {"environment": environment, "config": config, "values": values}
            with open(_OUTPUT.value, "a") as file:
                file.write(json.dumps(row) + "\n")
        else:
            append_row(name, environment, config, values)


if __name__ == "__main__":
    app.run(main)
