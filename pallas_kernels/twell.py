"""The TwELL format: tile-wise ELLPACK, a row-sparse matrix packed tile by tile.

Source: "Sparser, Faster, Lighter Transformer Language Models", arXiv 2603.23198.
"""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Twell:
    """A matrix `[..., num_columns]` of which only the non-zero entries are kept.

    The columns are cut into `num_tiles` tiles of `tile` neighbouring columns (the
    last one may be narrower). Every (row, tile) has a true count of its non-zeros
    and room for `slots` of them. Invariants, for every row and tile:

    - `count` is the number of entries that are not zero, NaN included. It is never
      clamped: `count > slots` marks an overflow, in which the entries past `slots`
      are lost.
    - entries stand in ascending column order, in the first `min(count, slots)`
      slots; all later slots hold index `num_columns` and value 0.

    Attributes:
      count: int32 `[..., num_tiles]`.
      index: int32 `[..., num_tiles, slots]`, column numbers in the whole matrix.
      value: `[..., num_tiles, slots]`, in the dtype of the packed matrix.
      num_columns: number of columns of the matrix.
      tile: number of columns in a tile.
    """

    count: jax.Array
    index: jax.Array
    value: jax.Array
    num_columns: int = dataclasses.field(metadata={"static": True})
    tile: int = dataclasses.field(metadata={"static": True})

    @property
    def slots(self) -> int:
        """Number of entries a (row, tile) has room for."""
        return self.value.shape[-1]

    @property
    def num_tiles(self) -> int:
        """Number of tiles in a row."""
        return self.count.shape[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix that this stands for."""
        return (*self.count.shape[:-1], self.num_columns)

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the values."""
        return self.value.dtype

    @property
    def overflowed(self) -> jax.Array:
        """bool `[...]`: rows that lost entries; every consumer returns NaN for them."""
        return jnp.any(self.count > self.slots, axis=-1)

    @property
    def exact(self) -> jax.Array:
        """bool scalar on the device: no row lost an entry."""
        return ~jnp.any(self.overflowed)
