"""How packed rows lie in GPU memory: 32-bit words.

A (row, tile) takes `slots + 1` words: the true count, then the entries. An entry holds the
bits of its bf16 value in the upper half and the neuron's number in the lower one, so a row
names at most 65,536 neurons. Words past `min(count, slots)` are undefined: they are never
written, and may be anything.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.twell import Twell

MAX_NEURONS = 1 << 16


def num_tiles(num_neurons: int, tile: int) -> int:
    """Tiles of a row; the last one may be narrower."""
    return -(-num_neurons // tile)


def entry_index(word: jax.Array) -> jax.Array:
    """Neuron number of an entry."""
    return word & 0xFFFF


def entry_value(word: jax.Array) -> jax.Array:
    """Value of an entry, f32."""
    return jax.lax.bitcast_convert_type(word & jnp.int32(-65536), jnp.float32)


def from_twell(twell: Twell) -> jax.Array:
    """`words [M, num_tiles, slots + 1]` of a bf16 Twell, `slots` rounded up for 16-byte copies."""
    bits = jax.lax.bitcast_convert_type(twell.value.astype(jnp.float32), jnp.int32)
    # An unused slot names a neuron that there is, as its row may be read before it is dropped.
    index = jnp.minimum(twell.index, twell.num_columns - 1)
    words = jnp.concatenate([twell.count[..., None], bits | index], axis=-1)
    words = jnp.pad(words, [(0, 0)] * (words.ndim - 1) + [(0, -words.shape[-1] % 4)])
    return words.reshape(-1, *words.shape[-2:])


def to_twell(words: jax.Array, *, num_neurons: int, tile: int) -> Twell:
    """The public form of `words [M, num_tiles, slots + 1]`; puts entries in column order."""
    count, entries = words[..., 0], words[..., 1:]
    slots = entries.shape[-1]
    used = jnp.arange(slots) < count[..., None]
    index = jnp.where(used, entry_index(entries), num_neurons)
    value = jnp.where(used, entry_value(entries), 0).astype(jnp.bfloat16)
    index, value = jax.lax.sort((index, value), dimension=-1, num_keys=1)
    return Twell(count=count, index=index, value=value, num_columns=num_neurons, tile=tile)
