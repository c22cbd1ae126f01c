"""Which neurons of a layer to compute how: plans and neuron orders from measured firing rates.

A neuron's firing rate is the share of tokens on which it is active. All functions take the
rates of one layer as `[num_shards, neurons]`: neurons are ordered, and bands are formed, inside
each tensor shard, and the plan is the same for all of them.
"""

import dataclasses

import numpy as np

from pallas_kernels import FfnPlan
from pallas_kernels.packed_ffn import FfnConfig

# Neurons of a tile. Bands end at tiles, which the packing matmul takes whole.
_TILE = 128

# Of the list budget of a batch: a plan that needs more of it on average would overflow often.
_LIST_SHARE = 0.75 * FfnConfig().max_active_share


@dataclasses.dataclass(frozen=True)
class FfnCosts:
    """Time of a layer with D = 2048, in ns for one token; other widths in proportion.

    Attributes:
      dense_neuron: of a neuron in the dense band.
      packed_neuron: of a neuron in the sparse band, active or not: gate, packing, lists.
      active_pair: of an active neuron in the sparse band.
      sparse_band: of having a sparse band at all.
    """

    dense_neuron: float
    packed_neuron: float
    active_pair: float
    sparse_band: float


# One H200, M = 32768, H = 5632, n from 7 to 29: the rows of backend mosaic_triton in
# benchmarks/results/ffn.forward.jsonl.
FORWARD_COSTS = FfnCosts(17.1e-3, 6.4e-3, 0.83, 12.0)

# Forward and backward. What the backward pass adds are times of prototypes of its kernels, on
# the same GPU at the same sizes: not yet those of the kernels themselves.
TRAINING_COSTS = FfnCosts(49.8e-3, 6.4e-3, 4.5, 20.0)


def predicted_ns(rates, plan: FfnPlan, hidden_size: int, costs: FfnCosts) -> float:
    """Predicted time in ns of the layer for one token, its neurons in the order of `rates`.

    With several shards it is that of a mean one. Infinite if the active neurons of the sparse
    band would not fit their lists.
    """
    rates = np.atleast_2d(rates)
    end = rates.shape[1] - plan.silent_band
    sparse = rates[:, plan.dense_band : end]
    time = costs.dense_neuron * min(plan.dense_band, end)
    if sparse.size:
        active = np.mean(np.sum(sparse, axis=1))
        if active > _LIST_SHARE * sparse.shape[1]:
            return float("inf")
        time += costs.packed_neuron * sparse.shape[1] + costs.active_pair * active
        time += costs.sparse_band
    return float(time * hidden_size / 2048)


def dense_plan(num_neurons: int) -> FfnPlan:
    """All neurons of a shard in the dense band."""
    return FfnPlan(dense_band=num_neurons)


def best_plan(
    rates,
    hidden_size: int,
    costs: FfnCosts,
    *,
    min_dense_band: int = 0,
    skip_silent: bool = False,
) -> FfnPlan:
    """The plan of the least predicted time, for neurons ordered by `neuron_order`.

    Args:
      rates: `[num_shards, neurons]`.
      hidden_size: width D.
      costs: of the pass that is planned for.
      min_dense_band: the least width of the dense band.
      skip_silent: leave out the neurons whose rate is 0 in every shard, all but the last tile
        that a shard must have left.
    """
    busiest_first = -np.sort(-np.atleast_2d(rates), axis=1)
    neurons = busiest_first.shape[1]
    silent = 0
    if skip_silent:
        firing = int(np.max(np.sum(busiest_first > 0, axis=1)))
        silent = max(neurons - max(-(-firing // _TILE) * _TILE, _TILE), 0)
    widths = [*range(0, neurons - silent, _TILE), neurons - silent]
    plans = [FfnPlan(width, silent) for width in widths if width >= min_dense_band]
    plans = plans or [dense_plan(neurons)]
    # The first of equals: the narrowest dense band.
    return min(plans, key=lambda plan: predicted_ns(busiest_first, plan, hidden_size, costs))


def neuron_order(rates, plan: FfnPlan) -> np.ndarray:
    """Numbers of the neurons, `[num_shards * neurons]`, in the order that `plan` asks for.

    The busiest first, in each shard; but those of the sparse band are dealt out to its tiles,
    so that no tile gets more active neurons than it has slots.
    """
    rates = np.atleast_2d(rates)
    neurons = rates.shape[1]
    order = np.argsort(-rates, axis=1, kind="stable")
    sparse = slice(plan.dense_band, neurons - plan.silent_band)
    size = sparse.stop - sparse.start
    # One place of every tile in turn.
    places = np.arange(-(-size // _TILE) * _TILE).reshape(-1, _TILE).T.reshape(-1)
    dealt = np.empty(size, int)
    dealt[places[places < size]] = np.arange(size)
    order[:, sparse] = order[:, sparse][:, dealt]
    return (order + neurons * np.arange(len(rates))[:, None]).reshape(-1)
