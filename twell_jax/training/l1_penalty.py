"""The coefficient of the L1 penalty: fixed, warmed up, or steered to a target L0.

The controller aims at a goal that falls, over `warmup_steps`, from the L0 of a fresh model
to the target: layers become sparse much faster than they recover, so a coefficient that is
too large must show, and be lowered, before L0 has fallen far past the target. It is a
proportional-integral controller on logarithms. With the error `e = log(L0 / goal)`, every
step moves the log of the coefficient by

    PROPORTIONAL * (e - e_before) + INTEGRAL * e

L0 follows the coefficient with a lag, roughly
`lag * d(log L0) = -(log L0 + a log c - const)` with `a` a little under 1. On such a plant
the closed loop is critically damped for `INTEGRAL = (1 + a P)^2 / (4 a lag)`, the gain below
for P = 1, a = 0.7, lag = 35; a lag of several times that overshoots but settles
(tests/training/test_l1_penalty.py). The integral part is limited for large errors, which it
would answer faster than L0 can. The gains were chosen on `tiny` (docs/log.md).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from twell_jax.training.config import L1Config

PROPORTIONAL = 1.0
INTEGRAL = 0.03
# Largest move of the log-coefficient by the integral part in one step.
MAX_INTEGRAL_MOVE = 0.02
# L0 of a single batch is noisy; the controller sees a mean over about this many steps.
SMOOTHING_STEPS = 10


class L1State(NamedTuple):
    """State of the controller; constant if the coefficient is fixed.

    Attributes:
      coefficient: f32 scalar; a fixed one is warmed up when it is used.
      error: f32 scalar, smoothed `log(L0 / goal)`; NaN before the first step.
    """

    coefficient: jax.Array
    error: jax.Array


def initial_l1_state(config: L1Config) -> L1State:
    """State before the first step."""
    return L1State(coefficient=jnp.float32(config.coefficient), error=jnp.float32(jnp.nan))


def effective_coefficient(config: L1Config, state: L1State, step: jax.Array) -> jax.Array:
    """The coefficient that step number `step` (from 0) trains with, f32 scalar."""
    if config.target_l0 or not config.warmup_steps:
        return state.coefficient
    return state.coefficient * jnp.minimum((step + 1) / config.warmup_steps, 1.0)


def update_l1_state(
    config: L1Config,
    state: L1State,
    step: jax.Array,
    l0: jax.Array,
    *,
    fresh_l0: float,
) -> L1State:
    """State after a step.

    Args:
      config: of the penalty.
      state: before the step.
      step: its number, from 0.
      l0: mean over layers of the L0 that it measured, f32 scalar.
      fresh_l0: L0 of a model with random weights.
    """
    if not config.target_l0:
        return state
    progress = jnp.minimum((step + 1) / max(config.warmup_steps, 1), 1.0)
    log_goal = (1 - progress) * math.log(fresh_l0) + progress * math.log(config.target_l0)
    # An L0 of 0 has no logarithm; half a neuron in a thousand tokens is as good.
    measured = jnp.log(jnp.maximum(l0, 5e-4)) - log_goal
    first = jnp.isnan(state.error)
    error = jnp.where(first, measured, state.error + (measured - state.error) / SMOOTHING_STEPS)
    change = jnp.where(first, 0.0, error - state.error)
    integral = jnp.clip(INTEGRAL * error, -MAX_INTEGRAL_MOVE, MAX_INTEGRAL_MOVE)
    move = PROPORTIONAL * change + integral
    coefficient = jnp.clip(
        state.coefficient * jnp.exp(move), config.min_coefficient, config.max_coefficient
    )
    return L1State(coefficient=coefficient.astype(jnp.float32), error=error)
