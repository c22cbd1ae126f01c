"""The plans of a run's feed-forward layers: dense at first, then as their firing rates ask for.

Plans are remade at stated steps from statistics of all devices, so that every process decides
alike. A layer keeps its plan unless another promises a clear gain, as a new one is a
recompilation.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from pallas_kernels import FfnPlan
from twell_jax.modules import TransformerConfig
from twell_jax.planning import TRAINING_COSTS, best_plan, dense_plan, neuron_order, predicted_ns
from twell_jax.training.config import PlanConfig

# Share of tokens that may be computed densely because they, or their batch, did not fit the
# sparse band, before the dense band is made wider.
_MAX_DENSE_SHARE = 0.01
# By how many neurons, at least, it is made wider then.
_WIDENING = 512
# Plans after which a layer may try a narrower dense band again.
_PATIENCE = 10


@dataclasses.dataclass
class _Layer:
    """A layer's plan, and the least dense band that it may get for `wait` more plans."""

    plan: FfnPlan
    min_dense_band: int = 0
    wait: int = 0


class Change(NamedTuple):
    """New plans.

    Attributes:
      order: int32 `[num_layers, H]`, see `reorder_neurons`.
      reasons: a line of text for every layer that got another plan or order.
    """

    order: np.ndarray
    reasons: list[str]


class Planner:
    """Keeps a plan for every layer."""

    def __init__(self, config: PlanConfig, model: TransformerConfig, num_shards: int):
        """All layers are dense at first; `num_shards` are the parts that neurons are split into."""
        self._config = config
        self._hidden_size = model.hidden_size
        self._num_shards = num_shards
        self._neurons = model.intermediate_size // num_shards
        self._layers = [_Layer(dense_plan(self._neurons)) for _ in range(model.num_layers)]

    @property
    def plans(self) -> tuple[FfnPlan, ...]:
        """The plan of each layer, for one tensor shard."""
        return tuple(layer.plan for layer in self._layers)

    def remake(self, rates: np.ndarray, dense_share: np.ndarray) -> Change | None:
        """Makes new plans; None if all stay as they are.

        Args:
          rates: `[num_layers, H]`, firing rates of the neurons in their present order.
          dense_share: `[num_layers]`, share of tokens that did not fit the sparse band.
        """
        identity = np.arange(rates.shape[1], dtype=np.int32)
        orders, reasons = [], []
        for number, layer in enumerate(self._layers):
            of_layer = np.asarray(rates[number], np.float64).reshape(self._num_shards, -1)
            order, reason = self._remake_layer(layer, of_layer, float(dense_share[number]))
            orders.append(identity if order is None else order.astype(np.int32))
            if reason:
                reasons.append(f"layer {number}: {reason}")
        if not reasons:
            return None
        return Change(np.stack(orders), reasons)

    def _remake_layer(self, layer, rates, dense_share) -> tuple[np.ndarray | None, str]:
        old = layer.plan
        overflows = dense_share > _MAX_DENSE_SHARE
        if overflows:
            layer.min_dense_band = min(old.dense_band + _WIDENING, self._neurons)
            layer.wait = _PATIENCE
        elif layer.wait:
            layer.wait -= 1
            layer.min_dense_band = layer.min_dense_band if layer.wait else 0
        costs = (self._hidden_size, TRAINING_COSTS)
        new = best_plan(rates, *costs, min_dense_band=layer.min_dense_band)
        order = neuron_order(rates, new)
        ordered = rates.reshape(-1)[order].reshape(rates.shape)
        now, then = predicted_ns(rates, old, *costs), predicted_ns(ordered, new, *costs)
        if not overflows and then > (1 - self._config.min_gain) * now:
            return None, ""
        if overflows:
            why = f"{dense_share:.1%} of the tokens did not fit the sparse band"
        elif np.isfinite(now):
            why = f"predicted {then / 1e3:.2f} us a token instead of {now / 1e3:.2f}"
        else:
            why = "the sparse band holds more active neurons than its lists"
        layer.plan = new
        active = rates.sum(axis=1).mean() * self._num_shards
        return order, (
            f"dense band {old.dense_band} -> {new.dense_band} of {self._neurons} neurons, "
            f"L0 {active:.1f}: {why}"
        )

    def state(self) -> dict:
        """For a checkpoint, as JSON."""
        layers = [dataclasses.asdict(layer) for layer in self._layers]
        return {"num_shards": self._num_shards, "layers": layers}

    def set_state(self, state: dict) -> bool:
        """Takes over the plans of a checkpoint; False if they are for other shards, and useless."""
        if state["num_shards"] != self._num_shards:
            return False
        self._layers = [
            _Layer(FfnPlan(**layer["plan"]), layer["min_dense_band"], layer["wait"])
            for layer in state["layers"]
        ]
        return True
