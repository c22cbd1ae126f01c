"""The coefficient of the L1 penalty, on simulated layers that answer late."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from twell_jax.training.config import L1Config
from twell_jax.training.l1_penalty import (
    effective_coefficient,
    initial_l1_state,
    update_l1_state,
)


def coefficients(config, l0s):
    state = initial_l1_state(config)
    seen = []
    for step, l0 in enumerate(l0s):
        seen.append(float(effective_coefficient(config, state, jnp.int32(step))))
        state = update_l1_state(config, state, jnp.int32(step), jnp.float32(l0), fresh_l0=2816)
    return seen


def test_fixed_coefficient():
    assert coefficients(L1Config(coefficient=2e-4), [500, 3, 0]) == pytest.approx([2e-4] * 3)


def test_warm_up_reaches_the_coefficient():
    seen = coefficients(L1Config(coefficient=1e-3, warmup_steps=4), [9] * 6)
    np.testing.assert_allclose(seen, [2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3], rtol=1e-6)


def simulate(config, *, exponent, lag, start, num_steps, noise=0.02, seed=0):
    """L0 over time of a plant with log L0 -> -exponent log(c) + const, with a lag in steps."""
    noises = noise * jax.random.normal(jax.random.key(seed), (num_steps,))

    def step(carry, inputs):
        log_l0, state = carry
        number, wobble = inputs
        coefficient = effective_coefficient(config, state, number)
        goal = jnp.log(100.0) - exponent * jnp.log(coefficient / 1e-4)
        log_l0 = log_l0 + (jnp.clip(goal, -2.0, jnp.log(2816.0)) - log_l0) / lag
        state = update_l1_state(
            config,
            state,
            number,
            jnp.exp(log_l0 + wobble),
            fresh_l0=2816,
        )
        return (log_l0, state), jnp.exp(log_l0)

    carry = (jnp.log(jnp.float32(start)), initial_l1_state(config))
    return np.asarray(jax.lax.scan(step, carry, (jnp.arange(num_steps), noises))[1])


CONFIG = L1Config(coefficient=2e-5, warmup_steps=100, target_l0=30.0)


@pytest.mark.parametrize("exponent", [0.4, 0.7, 1.0])
@pytest.mark.parametrize("lag", [25, 50, 200])
@pytest.mark.parametrize(("start", "coefficient"), [(2816.0, 2e-5), (5.0, 5e-3)])
def test_controller_reaches_the_target_and_stays(exponent, lag, start, coefficient):
    config = dataclasses.replace(CONFIG, coefficient=coefficient)
    l0 = simulate(config, exponent=exponent, lag=lag, start=start, num_steps=8000)
    np.testing.assert_allclose(l0[5000:], 30.0, rtol=0.1)
    # From either side it overshoots by less than a factor of 2, and once.
    if start > 30:
        assert l0.min() > 15
    else:
        assert l0.max() < 60
    inside = np.abs(np.log(l0 / 30)) < np.log(1.1)
    assert np.sum(np.diff(inside.astype(int)) == -1) <= 2


def test_coefficient_stays_in_its_limits():
    config = dataclasses.replace(CONFIG, warmup_steps=0, max_coefficient=1e-3)
    assert max(coefficients(config, [2000] * 3000)) == pytest.approx(1e-3)
    config = dataclasses.replace(CONFIG, warmup_steps=0, min_coefficient=1e-6)
    assert min(coefficients(config, [0] * 3000)) == pytest.approx(1e-6)
