"""The coefficient of the L1 penalty: fixed, warmed up, or steered to a target L0.

The controller is a proportional-integral one on logarithms. With the error
`e = log(L0 / target)`, every step moves the log of the coefficient by

    PROPORTIONAL * (e - e_before) + INTEGRAL * e

L0 follows the coefficient with a lag of a few hundred steps, roughly
`lag * d(log L0) = -(log L0 + a log c - const)` with `a` a little under 1. On such a plant
the closed loop is critically damped for `INTEGRAL = (1 + a P)^2 / (4 a lag)`, about 0.005
for P = 1, a = 0.7, lag = 200, which is the gain below; plants of half and twice that lag
overshoot once, by little (tests/training/test_l1_penalty.py). The integral part is limited
for errors as large as those of a fresh, dense model, where it would run the coefficient up
before L0 has had time to answer.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from twell_jax.training.config import L1Config

PROPORTIONAL = 1.0
INTEGRAL = 0.005
# Largest move of the log-coefficient by the integral part in one step.
MAX_INTEGRAL_MOVE = 0.01
# L0 of a single batch is noisy; the controller sees a mean over about this many steps.
SMOOTHING_STEPS = 10


class L1State(NamedTuple):
    """State of the controller; constant if the coefficient is fixed.

    Attributes:
      coefficient: f32 scalar, before warm-up is applied.
      error: f32 scalar, smoothed `log(L0 / target)`; NaN before the first step.
    """

    coefficient: jax.Array
    error: jax.Array


def initial_l1_state(config: L1Config) -> L1State:
    """State before the first step."""
    return L1State(coefficient=jnp.float32(config.coefficient), error=jnp.float32(jnp.nan))


def effective_coefficient(config: L1Config, state: L1State, step: jax.Array) -> jax.Array:
    """The coefficient that step number `step` (from 0) trains with, f32 scalar."""
    if not config.warmup_steps:
        return state.coefficient
    return state.coefficient * jnp.minimum((step + 1) / config.warmup_steps, 1.0)


def update_l1_state(config: L1Config, state: L1State, step: jax.Array, l0: jax.Array) -> L1State:
    """State after step number `step`, in which the mean L0 of the layers was `l0`."""
    if not config.target_l0:
        return state
    # An L0 of 0 has no logarithm; half a neuron in a thousand tokens is as good.
    measured = jnp.log(jnp.maximum(l0, 5e-4) / config.target_l0)
    first = jnp.isnan(state.error)
    error = jnp.where(first, measured, state.error + (measured - state.error) / SMOOTHING_STEPS)
    change = jnp.where(first, 0.0, error - state.error)
    move = PROPORTIONAL * change + jnp.clip(INTEGRAL * error, -MAX_INTEGRAL_MOVE, MAX_INTEGRAL_MOVE)
    # While the coefficient is still warming up its effect is not that of its value.
    move = jnp.where(step + 1 < config.warmup_steps, 0.0, move)
    coefficient = jnp.clip(
        state.coefficient * jnp.exp(move), config.min_coefficient, config.max_coefficient
    )
    return L1State(coefficient=coefficient.astype(jnp.float32), error=error)
