r"""Times the forward pass of a feed-forward layer, dense and sparse, and the parts of the latter.

  python -m benchmarks.ffn --tokens=32768 --active=7,29 --rates=uniform

Outputs are compared with f32 first, row by row, after 2 GiB of memory full of NaN were freed.
Then everything is timed in turn, several rounds. Dense is the faster of three XLA matmuls and of
two, with gate and up merged. Writes one row for each number of active neurons.
"""

import functools
import itertools
import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks.results import append_row
from benchmarks.workload import RATES, firing_rates, make_layer
from pallas_kernels import BACKENDS, sparse_ffn
from pallas_kernels.mosaic_gpu import consumer, gate
from pallas_kernels.packed_ffn import FfnConfig, list_capacity
from pallas_kernels.triton_gpu import launch
from twell_jax.environment import describe_environment
from twell_jax.flops import peak_flops

_HIDDEN_SIZE = flags.DEFINE_list("hidden_size", ["2048"], "Width D; several in turn.")
_INTERMEDIATE_SIZE = flags.DEFINE_list(
    "intermediate_size", ["5632"], "Number H of hidden neurons; several in turn."
)
_TOKENS = flags.DEFINE_list("tokens", ["32768"], "Number M of tokens; several in turn.")
_ACTIVE = flags.DEFINE_list("active", ["29"], "Mean active neurons of a token; several in turn.")
_RATES = flags.DEFINE_enum("rates", "uniform", RATES, "How unevenly neurons fire.")
_RATES_FILE = flags.DEFINE_string("rates_file", "", "For --rates=file: an .npz with 'rates'.")
_LAYER = flags.DEFINE_list(
    "layer", ["0"], "For --rates=file: which layer's rates; several in turn."
)
_BACKEND = flags.DEFINE_enum("backend", "mosaic_gpu", BACKENDS, "Backend of sparse_ffn.")
_PARTS = flags.DEFINE_bool("parts", True, "Also time the parts (GPU backends).")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Rounds of all in turn.", lower_bound=5)
_REPEATS = flags.DEFINE_integer("repeats", 10, "Calls of each in a round.", lower_bound=1)
_OUTPUT = flags.DEFINE_string(
    "output", "", "Write rows to this file, for `append`; by default to benchmarks/results."
)

# Rate at which rows come from the L2 cache of an H200, as measured for random rows of 4 KiB.
_L2_BYTES_PER_SECOND = 8e12


class DisagreementError(RuntimeError):
    """An output is not what it must be, so that its time means nothing."""


def dense_separate(x, w_gate, w_up, w_down):
    """Three matmuls, elementwise work fused by XLA."""
    return (jax.nn.relu(x @ w_gate.T) * (x @ w_up.T)) @ w_down


def dense_merged(x, w_both, w_down):
    """Two matmuls; `w_both` has the rows of the gate, then those of up."""
    gates, up = jnp.split(x @ w_both.T, 2, axis=1)
    return (jax.nn.relu(gates) * up) @ w_down


# Error of a sum of products, over the norms of both factors: tensor cores cut digits off as they
# add. For 1 row in 3000 the allowance is more than 2^-7 of the row, for the median one 4e-4.
_SUM_ROUNDING = 2.0**-20


@jax.jit
def _truth_of_piece(x, w_gate, w_up, w_down):
    # Not on tensor cores, as dense and sparse are.
    x, w_gate, w_up, w_down = (a.astype(jnp.float32) for a in (x, w_gate, w_up, w_down))
    product = functools.partial(jnp.einsum, precision="highest")
    gates = jax.nn.relu(product("td,hd->th", x, w_gate))
    up = product("td,hd->th", x, w_up)
    y = product("th,hd->td", gates * up, w_down)

    def norms(array):
        return jnp.linalg.norm(array, axis=-1)

    # What the rounding of both sums can do to h, then to y.
    per_gate, per_up = norms(w_up) * norms(w_down), norms(w_gate) * norms(w_down)
    spread = gates @ per_gate + jnp.where(gates > 0, jnp.abs(up), 0) @ per_up
    return y, _SUM_ROUNDING * norms(x) * spread


def truth_of(layer, rows=4096):
    """f32 y, and by how much its rows depend on the order in which sums are taken.

    A row may have a single active neuron whose `up` is nearly 0: all digits of it are rounding.
    """
    x, w_gate, w_up, w_down = layer
    pieces = [
        _truth_of_piece(x[first : first + rows], w_gate, w_up, w_down)
        for first in range(0, len(x), rows)
    ]
    return tuple(jnp.concatenate(parts) for parts in zip(*pieces, strict=True))


def relative_row_errors(y, truth, rounding) -> np.ndarray:
    """Error of every row, less `rounding [M]`, over its norm; rows that are 0 must be 0."""
    norms = jnp.linalg.norm(truth, axis=-1)
    errors = jnp.linalg.norm(y.astype(jnp.float32) - truth, axis=-1)
    # Not jnp.maximum alone: a NaN must stay.
    errors = jnp.where(errors <= rounding, 0, errors - rounding)
    return np.asarray(jnp.where(norms > 0, errors / jnp.maximum(norms, 1e-30), errors))


def poison_memory() -> None:
    """Fills 2 GiB with NaN and frees them: a buffer that is not written will show it."""
    jax.block_until_ready(jnp.full((2 << 30) // 4, jnp.nan, jnp.float32))


def compare(layer, dense, sparse) -> dict:
    """Compares all outputs; returns the errors.

    Raises:
      DisagreementError: a row of y is off by more than twice the worst row of the dense
        layer, or a statistic is wrong.
    """
    truth, rounding = truth_of(layer)
    dense_error = relative_row_errors(dense(*layer), truth, rounding).max()
    poison_memory()
    y, stats = jax.block_until_ready(sparse(*layer))
    errors = relative_row_errors(y, truth, rounding)
    _, expected = compiled("reference")[2](*layer)
    # Gates within a rounding of 0 may fall on either side: not many, and evenly.
    flips = np.abs(np.asarray(stats.fired) - np.asarray(expected.fired)).sum()
    result = {
        "max_row_error": float(errors.max()),
        "dense_max_row_error": float(dense_error),
        "fired_difference": int(flips),
        "fired": int(np.asarray(expected.fired).sum()),
        "l1_relative_error": abs(float(stats.l1) / float(expected.l1) - 1),
        "active": float(stats.l0),
        "num_dense": int(stats.num_dense),
    }
    if not errors.max() <= max(2 * dense_error, 2**-7):
        raise DisagreementError(f"row {errors.argmax()} of y is off: {result}")
    if flips > 1e-4 * result["fired"] + 2 or not result["l1_relative_error"] < 2**-8:
        raise DisagreementError(f"statistics differ: {result}")
    if not np.isclose(result["active"] * len(errors), np.asarray(stats.fired).sum(), rtol=1e-5):
        raise DisagreementError(f"l0 and fired differ: {result}")
    return result


def time_in_turn(functions: dict) -> dict:
    """`{name: {"median", "p20", "p80"}}` in ms of functions without arguments."""
    for function in functions.values():
        jax.block_until_ready(function())
    seconds = {name: [] for name in functions}
    for _ in range(_ROUNDS.value):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(_REPEATS.value):
                result = function()
            jax.block_until_ready(result)
            seconds[name].append((time.perf_counter() - start) / _REPEATS.value)
    return {
        name: dict(
            zip(
                ("p20", "median", "p80"),
                (1e3 * np.percentile(values, (20, 50, 80))).tolist(),
                strict=True,
            )
        )
        for name, values in seconds.items()
    }


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
        return parts | {"consumer": lambda: up_down(words, x, w_up, w_down)}
    # As many of them as `sparse_ffn` would take.
    capacity = list_capacity(len(x), len(w_gate), FfnConfig())
    overflowed = jnp.any(words[:, :, 0] > config.slots, axis=1)
    lengths = jnp.where(overflowed, 0, jnp.sum(words[:, :, 0], axis=1))
    if int(jnp.sum(lengths)) > capacity:
        return parts
    make_lists, up_down = jax.jit(launch.make_lists, static_argnums=2), jax.jit(launch.up_down)
    lists = make_lists(words, lengths, capacity)
    return parts | {
        "lists": lambda: make_lists(words, lengths, capacity),
        "consumer": lambda: up_down(lists, x, w_up, w_down),
    }


@functools.cache
def compiled(backend: str):
    """The jitted layers, so that only a new shape compiles: dense, merged, sparse."""
    sparse = functools.partial(sparse_ffn, backend=backend)
    return jax.jit(dense_separate), jax.jit(dense_merged), jax.jit(sparse)


def measure(
    tokens: int, size: int, neurons: int, layer_number: int, active: float
) -> tuple[dict, dict]:
    """(config, values) of a row."""
    dense, merged, sparse = compiled(_BACKEND.value)
    # A backend that cannot serve this says so before anything is made or timed.
    shapes = [jax.ShapeDtypeStruct((rows, size), jnp.bfloat16) for rows in (tokens, *3 * [neurons])]
    jax.eval_shape(sparse, *shapes)
    rates = firing_rates(_RATES.value, neurons, active, file=_RATES_FILE.value, layer=layer_number)
    layer = make_layer(tokens, size, rates)
    x, w_gate, w_up, w_down = layer
    values = compare(layer, dense, sparse)
    w_both = jnp.concatenate([w_gate, w_up])
    functions = {
        "dense_separate": lambda: dense(*layer),
        "dense_merged": lambda: merged(x, w_both, w_down),
        "sparse": lambda: sparse(*layer),
    }
    if _PARTS.value and _BACKEND.value not in ("auto", "reference"):
        functions |= parts_of(layer, _BACKEND.value)
    times = time_in_turn(functions)
    fastest = min(("dense_separate", "dense_merged"), key=lambda name: times[name]["median"])
    values |= {"dense": fastest, "dense_ms": times[fastest], "sparse_ms": times["sparse"]}
    values["ratio"] = times[fastest]["median"] / times["sparse"]["median"]
    values["parts_ms"] = {n: t for n, t in times.items() if n not in (fastest, "sparse")}
    pairs = values["active"] * tokens
    gate_flops = 2 * tokens * size * neurons
    peak = peak_flops(jax.devices()[0].device_kind)
    if peak:
        floors = {
            "gate_ms": 1e3 * gate_flops / peak,
            "consumer_ms": 1e3 * pairs * 4 * size / _L2_BYTES_PER_SECOND,
        }
        values["floor"] = floors
        values["floor_ratio"] = times["sparse"]["median"] / sum(floors.values())
        values["dense_tflops_per_second"] = 3 * gate_flops / times[fastest]["median"] / 1e9
    config = {
        "hidden_size": size,
        "intermediate_size": neurons,
        "tokens": tokens,
        "active": active,
        "rates": _RATES.value,
        "backend": _BACKEND.value,
        "plan": None,
    }
    if _RATES.value == "file":
        config["layer"] = layer_number
    return config, values


def main(argv: list[str]) -> None:
    """Command line of `python -m benchmarks.ffn`."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    environment = describe_environment()
    try:
        sizes = [
            [int(number) for number in flag.value]
            for flag in (_TOKENS, _HIDDEN_SIZE, _INTERMEDIATE_SIZE, _LAYER)
        ]
        cases = list(itertools.product(*sizes, map(float, _ACTIVE.value)))
    except ValueError as error:
        raise app.UsageError(str(error)) from None
    for case in cases:
        try:
            config, values = measure(*case)
        except (DisagreementError, NotImplementedError, ValueError) as error:
            sys.exit(f"ffn: {error}")
        parts = "  ".join(f"{n} {t['median']:.3f}" for n, t in values["parts_ms"].items())
        print(
            f"M {config['tokens']} D {config['hidden_size']} H {config['intermediate_size']} "
            f"{config['rates']} active {values['active']:.1f}: {values['dense']} "
            f"{values['dense_ms']['median']:.3f} ms, "
            f"sparse {values['sparse_ms']['median']:.3f} ms, ratio {values['ratio']:.2f}, "
            f"row error {values['max_row_error']:.2e} "
            f"(dense {values['dense_max_row_error']:.2e})  {parts}",
            flush=True,
        )
        if _OUTPUT.value:
            row = {"environment": environment, "config": config, "values": values}
            with open(_OUTPUT.value, "a") as file:
                file.write(json.dumps(row) + "\n")
        else:
            append_row("ffn.forward", environment, config, values)


if __name__ == "__main__":
    app.run(main)
