"""Plans and orders from firing rates."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from benchmarks.workload import firing_rates
from pallas_kernels import FfnPlan
from twell_jax.planning import (
    FORWARD_COSTS,
    TRAINING_COSTS,
    best_plan,
    dense_plan,
    neuron_order,
    predicted_ns,
)

WIDTH = 2048


def time_of(rates, plan, costs):
    rates = np.atleast_2d(rates)
    ordered = rates.reshape(-1)[neuron_order(rates, plan)].reshape(rates.shape)
    return predicted_ns(ordered, plan, WIDTH, costs)


@pytest.mark.parametrize("costs", [FORWARD_COSTS, TRAINING_COSTS])
def test_a_dense_layer_stays_dense_and_a_sparse_one_sparse(costs):
    assert best_plan(np.full(5632, 0.5), WIDTH, costs) == dense_plan(5632)
    assert best_plan(np.full(5632, 0.002), WIDTH, costs) == FfnPlan()
    heavy = firing_rates("heavy", 5632, 29.0)
    plan = best_plan(heavy, WIDTH, costs)
    assert 0 < plan.dense_band < 3000
    assert time_of(heavy, plan, costs) < time_of(heavy, FfnPlan(), costs)
    assert time_of(heavy, plan, costs) < 0.75 * time_of(heavy, dense_plan(5632), costs)


@hypothesis.given(
    seed=st.integers(0, 2**32 - 1),
    neurons=st.integers(1, 1500),
    shards=st.sampled_from([1, 2, 4]),
    skip_silent=st.booleans(),
    min_dense_band=st.integers(0, 2000),
)
@hypothesis.settings(deadline=None)
def test_plans_and_orders_are_legal(seed, neurons, shards, skip_silent, min_dense_band):
    rng = np.random.default_rng(seed)
    rates = rng.random((shards, neurons)) ** rng.integers(1, 60)
    rates[:, rng.random(neurons) < 0.3] = 0
    plan = best_plan(
        rates, WIDTH, FORWARD_COSTS, skip_silent=skip_silent, min_dense_band=min_dense_band
    )
    plan.check(neurons)
    assert plan.silent_band == 0 or skip_silent
    kept = neurons - plan.silent_band
    assert plan.dense_band >= min(min_dense_band, kept) or plan.dense_band == kept
    order = neuron_order(rates, plan)
    # A permutation that leaves every neuron in its shard.
    np.testing.assert_array_equal(np.sort(order), np.arange(shards * neurons))
    np.testing.assert_array_equal(order // neurons, np.repeat(np.arange(shards), neurons))
    ordered = rates.reshape(-1)[order].reshape(shards, neurons)
    for of_shard in ordered:
        dense = of_shard[: plan.dense_band]
        sparse, silent = of_shard[plan.dense_band : kept], of_shard[kept:]
        if sparse.size:
            assert dense.min(initial=1) >= sparse.max()
            # Dealt out: whole tiles differ by at most the busiest neuron.
            sums = sparse[: len(sparse) // 128 * 128].reshape(-1, 128).sum(axis=1)
            assert np.ptp(sums) <= sparse.max() + 1e-9 if sums.size else True
        assert np.all(silent == 0)


def test_an_overfull_plan_is_never_the_best():
    """A sparse band whose active neurons would not fit their lists falls back to dense."""
    rates = np.full(1024, 0.02)
    assert predicted_ns(rates, FfnPlan(), WIDTH, FORWARD_COSTS) == float("inf")
    assert best_plan(rates, WIDTH, FORWARD_COSTS) == dense_plan(1024)
