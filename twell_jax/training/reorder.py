"""Puts the hidden neurons of the layers into another order, and all that belongs to them.

The function of the model stays what it is, up to the order of sums.
"""

import jax
import jax.numpy as jnp

from twell_jax.training.state import TrainState

# Arrays of a layer with an entry, or a row, for every neuron.
FFN_ROWS = ("w_gate", "w_up", "w_down")
# Arrays of all layers, `[num_layers, neurons]`.
_BY_LAYER = ("steps_since_fired", "firing_rates")


def reorder_neurons(state: TrainState, order: jax.Array, num_shards: int) -> TrainState:
    """The state with neurons reordered: weights, moments of the optimizer, statistics.

    Args:
      state: with sparse layers.
      order: int32 `[num_layers, H]`: neuron i of the new order was number `order[layer, i]`.
        Every neuron must stay in its tensor shard, one of `num_shards` equal parts.
      num_shards: parts that neurons are split into, so that no shard asks another for rows.
    """
    num_layers, neurons = order.shape
    width = neurons // num_shards
    first = width * jnp.arange(num_shards)[:, None]
    within = order.reshape(num_layers, num_shards, width) - first

    def of_layer(array, within):
        parts = array.reshape(num_shards, width, *array.shape[1:])
        return jax.vmap(lambda rows, numbers: rows[numbers])(parts, within).reshape(array.shape)

    def reordered(path, leaf):
        names = [getattr(key, "key", getattr(key, "name", None)) for key in path]
        if names[-1] in FFN_ROWS:
            return of_layer(leaf, within[names[names.index("blocks") + 1]])
        if names[-1] in _BY_LAYER:
            return jnp.stack([of_layer(leaf[n], within[n]) for n in range(num_layers)])
        return leaf

    return jax.tree.map_with_path(reordered, state)
