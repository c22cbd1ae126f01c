"""The case table: every backend runs all of it, forward and backward.

Gate operands lie on a grid of eighths small enough that every gate is an exact f32
sum in any order. So all backends, and the f64 truth, agree on which neurons are
active, and gates of exactly zero occur.
"""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np

TOKENS = (1, 7, 64, 257)
HIDDEN_SIZES = (64, 192, 256, 576)
INTERMEDIATE_SIZES = (128, 344, 1000)
DENSITIES = (0.0, 0.005, 0.05, 0.5, 1.0)
DTYPES = ("float32", "bfloat16")
MASKS = ("none", "random", "all")
POISONS = ("nan", "inf", "-inf")

# The constant column of x, which turns a column of the gate weights into a bias.
_BIAS_INPUT = 4.0


@dataclasses.dataclass(frozen=True)
class Case:
    """One input of `sparse_ffn`; `tokens` may be a shape of any rank."""

    tokens: tuple[int, ...]
    hidden_size: int
    intermediate_size: int
    density: float
    dtype: str
    gated: bool = True
    mask: str = "none"
    poison: str = ""

    def __str__(self):
        tokens = "x".join(map(str, self.tokens)) or "scalar"
        parts = [f"M{tokens}-D{self.hidden_size}-H{self.intermediate_size}"]
        parts += [f"{self.density:g}", self.dtype, "gated" if self.gated else "plain"]
        parts += [f"mask_{self.mask}"] if self.mask != "none" else []
        parts += [self.poison] if self.poison else []
        return "-".join(parts)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arguments and cotangents of one call, in the dtype of the case."""

    x: jnp.ndarray
    w_gate: jnp.ndarray | None
    w_up: jnp.ndarray
    w_down: jnp.ndarray
    token_mask: jnp.ndarray | None
    y_bar: jnp.ndarray
    l1_bar: float
    poisoned: int | None  # flat number of the token that holds a NaN or inf


def _table() -> list[Case]:
    table = []
    shapes = itertools.product(
        enumerate(TOKENS), enumerate(HIDDEN_SIZES), enumerate(INTERMEDIATE_SIZES)
    )
    # Every shape, neighbouring ones in turn in f32 and bf16; the other properties cycle.
    for (i, tokens), (j, hidden_size), (k, intermediate_size) in shapes:
        for n, dtype in enumerate(DTYPES):
            if (i + j + k + n) % 2:
                continue
            table.append(
                Case(
                    tokens=(tokens,),
                    hidden_size=hidden_size,
                    intermediate_size=intermediate_size,
                    density=DENSITIES[(i + 2 * j + k + n) % len(DENSITIES)],
                    dtype=dtype,
                    gated=(i + j + k) % 3 != 0,
                    mask=MASKS[(i + k + n) % 2],
                )
            )
    # The full product of the rest at one small shape.
    small = {"hidden_size": 64, "intermediate_size": 344}
    for density, dtype, gated, mask in itertools.product(DENSITIES, DTYPES, (True, False), MASKS):
        table.append(
            Case(tokens=(7,), density=density, dtype=dtype, gated=gated, mask=mask, **small)
        )
    for tokens, dtype in itertools.product(((), (4, 16), (3, 2, 5)), DTYPES):
        table.append(Case(tokens=tokens, density=0.05, dtype=dtype, mask="random", **small))
    for poison, dtype, gated, mask in itertools.product(
        POISONS, DTYPES, (True, False), ("none", "random")
    ):
        table.append(
            Case((64,), density=0.05, dtype=dtype, gated=gated, mask=mask, poison=poison, **small)
        )
    return table


TABLE = _table()


def _grid(rng, shape):
    return np.clip(np.round(rng.normal(size=shape) * 8) / 8, -4, 4)


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Random arguments whose share of active neurons is about `case.density`."""
    rng = np.random.default_rng(seed)
    num_tokens = int(np.prod(case.tokens))
    d, h = case.hidden_size, case.intermediate_size
    x = _grid(rng, (num_tokens, d))
    x[:, 0] = _BIAS_INPUT
    gate = _grid(rng, (h, d))
    # Bias so that gates, of standard deviation sqrt(D), are positive with the wanted
    # probability. 0 and 1 need a bias out of reach: 6.25 sqrt(D) is.
    probability = np.clip(case.density, 1e-9, 1 - 1e-9)
    quantile = np.quantile(rng.normal(size=200_000), probability)
    if case.density in (0.0, 1.0):
        quantile = 12.5 * (case.density - 0.5)
    gate[:, 0] = np.round(quantile * np.sqrt(d) / _BIAS_INPUT * 8) / 8
    other = rng.normal(size=(h, d)) / np.sqrt(d)
    down = rng.normal(size=(h, d)) / np.sqrt(max(case.density * h, 1.0))

    token_mask = None
    if case.mask == "random":
        token_mask = rng.random(num_tokens) < 0.6
    elif case.mask == "all":
        token_mask = np.zeros(num_tokens, bool)
    poisoned = None
    if case.poison:
        poisoned = num_tokens // 2
        x[poisoned, rng.integers(1, d)] = float(case.poison)

    def cast(array):
        return jnp.asarray(array, case.dtype)

    return Inputs(
        x=cast(x).reshape(*case.tokens, d),
        w_gate=cast(gate) if case.gated else None,
        w_up=cast(other) if case.gated else cast(gate),
        w_down=cast(down),
        token_mask=None if token_mask is None else jnp.asarray(token_mask.reshape(case.tokens)),
        y_bar=cast(rng.normal(size=(*case.tokens, d))),
        l1_bar=0.7 * max(num_tokens, 1),
        poisoned=poisoned,
    )
