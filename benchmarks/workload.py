"""Random feed-forward layers whose neurons fire at given rates."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

# The constant input that turns a column of the gate weights into a bias.
_BIAS_INPUT = 16.0

RATES = ("uniform", "heavy", "file")


def firing_rates(
    kind: str, num_neurons: int, active: float, *, file: str = "", layer: int = 0
) -> np.ndarray:
    """Probability that a neuron fires on a token, `[num_neurons]`, of sum `active`.

    "uniform": all alike. "heavy": log-normal with a standard deviation of 1.5, 30 % of the
    neurons silent, none above 0.6. "file": row `layer` of the array `rates` of an .npz file, as
    measured; `active` is not used.

    Raises:
      ValueError: the file has another number of neurons.
    """
    if kind == "uniform":
        return np.full(num_neurons, active / num_neurons)
    if kind == "file":
        rates = np.load(pathlib.Path(file))["rates"][layer]
        if len(rates) != num_neurons:
            raise ValueError(f"{file} has rates of {len(rates)} neurons, not of {num_neurons}")
        return rates
    rng = np.random.default_rng(0)
    rates = np.exp(1.5 * rng.normal(size=num_neurons))
    rates[rng.permutation(num_neurons)[: int(0.3 * num_neurons)]] = 0
    for _ in range(50):
        rates = np.minimum(rates * active / rates.sum(), 0.6)
    return rates


def make_layer(num_tokens: int, hidden_size: int, rates: np.ndarray, seed: int = 0) -> tuple:
    """bf16 `(x, w_gate, w_up, w_down)` with normal entries, whose gates are open at `rates`.

    The first input is constant; the first column of the gate weights holds the biases.
    """
    num_neurons = len(rates)
    keys = jax.random.split(jax.random.key(seed), 4)
    bias = jax.scipy.special.ndtri(jnp.clip(jnp.asarray(rates, jnp.float32), 1e-9, 1 - 1e-6))
    x = jax.random.normal(keys[0], (num_tokens, hidden_size)).at[:, 0].set(_BIAS_INPUT)
    shape = (num_neurons, hidden_size)
    w_gate = jax.random.normal(keys[1], shape) / np.sqrt(hidden_size - 1)
    w_gate = w_gate.at[:, 0].set(bias / _BIAS_INPUT)
    w_up = jax.random.normal(keys[2], shape) / np.sqrt(hidden_size)
    w_down = jax.random.normal(keys[3], shape) / np.sqrt(max(rates.sum(), 1))
    return tuple(array.astype(jnp.bfloat16) for array in (x, w_gate, w_up, w_down))
