"""The lookup of token embeddings, over a mesh where there is one."""

import jax
from jax.sharding import PartitionSpec as P

from twell_jax.sharding import TENSOR, TOKEN_AXES, active_axes, dividing_axes
from twell_jax.sharding.gathers import local_weight, split_columns


def embed(table: jax.Array, tokens: jax.Array, dtype) -> jax.Array:
    """Rows of `table`, rounded to `dtype`.

    The gradient of the table is f32: that of a frequent token is the sum of thousands of rows,
    which bf16 would round away. Over a mesh the table is gathered, as a lookup in a split one
    moves activations.

    Args:
      table: `[vocab, width]`.
      tokens: int `[batch, length]`, in `[0, vocab)`.
      dtype: of the result.

    Returns:
      `[batch, length, width]`.
    """
    axes = dividing_axes(TOKEN_AXES, tokens.shape[0])
    split_axis = split_columns(table, axes)
    has_tensor = bool(active_axes((TENSOR,)))

    def lookup(table, tokens):
        table = local_weight(table, dtype, split_axis, axes)
        if has_tensor:
            table = jax.lax.with_sharding_constraint(table, P())
        return table[tokens].astype(dtype)

    if not axes:
        return lookup(table, tokens)
    batch = P(axes)
    return jax.shard_map(
        lookup, in_specs=(P(None, split_axis), batch), out_specs=batch, axis_names=set(axes)
    )(table, tokens)
