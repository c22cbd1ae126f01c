"""Times functions in turn, so that all see the same device in the same state."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np


def spread(seconds) -> dict:
    """Median and percentiles, in milliseconds, of times in seconds."""
    p20, median, p80 = np.percentile(np.asarray(seconds) * 1e3, [20, 50, 80])
    return {"median": float(median), "p20": float(p20), "p80": float(p80)}


def time_in_turn(functions: dict[str, Callable], *, rounds: int, repeats: int) -> dict:
    """`spread` by name of functions without arguments; `repeats` calls of each in a round."""
    for function in functions.values():
        jax.block_until_ready(function())
    seconds = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(repeats):
                result = function()
            jax.block_until_ready(result)
            seconds[name].append((time.perf_counter() - start) / repeats)
            del result
    return {name: spread(values) for name, values in seconds.items()}


def poison_memory() -> None:
    """Fills 2 GiB with NaN and frees them: a buffer that is not written will show it."""
    jax.block_until_ready(jnp.full((2 << 30) // 4, jnp.nan, jnp.float32))
