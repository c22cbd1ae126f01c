"""Batches for training and evaluation, read by Grain from a prepared folder."""

from collections.abc import Iterator

import grain
import numpy as np

from twell_jax.data.store import TokenStream
from twell_jax.data.windows import TokenWindows
from twell_jax.errors import DataError

Batch = dict[str, np.ndarray]

# More threads would only fight over the interpreter's lock, with the training loop too.
_READ_OPTIONS = grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)


def training_dataset(
    path: str,
    *,
    sequence_length: int,
    batch_size: int,
    seed: int,
    part: int = 0,
    num_parts: int = 1,
) -> grain.IterDataset:
    """An endless stream of batches, shuffled anew by `seed` in every epoch.

    The global batch of step s is elements `[s * batch_size, (s + 1) * batch_size)` of the
    shuffled, repeated windows, whatever the number of processes; part p of it is every
    `num_parts`-th of them, from the p-th on. The state of its iterator is the number
    of the next batch.

    Args:
      path: a folder written by `twell_jax.prepare`.
      sequence_length: tokens of an example.
      batch_size: examples of a global batch.
      seed: of the shuffle.
      part: number of the part of every batch that is read here.
      num_parts: parts that a batch is read in; must divide `batch_size`.

    Raises:
      DataError: the data is unusable, or the batch does not divide.
    """
    if batch_size % num_parts:
        raise DataError(f"batch_size: {batch_size} does not divide into {num_parts} parts")
    windows = TokenWindows(TokenStream(path, "train"), sequence_length)
    return (
        grain.MapDataset.range(len(windows))
        .seed(seed)
        .shuffle()
        # Of an endless repetition, Grain cannot take batches of 1: their number overflows.
        .repeat(2**62 // len(windows))
        .slice(slice(part, None, num_parts))
        .batch(batch_size // num_parts)
        .map(windows.batch)
        .to_iter_dataset(_READ_OPTIONS)
    )


def evaluation_batches(
    path: str, *, sequence_length: int, batch_size: int, split: str = "validation"
) -> Iterator[Batch]:
    """Every window of a split once, in order; the last batch is filled up with padding."""
    windows = TokenWindows(TokenStream(path, split), sequence_length)
    for first in range(0, len(windows), batch_size):
        numbers = range(first, min(first + batch_size, len(windows)))
        padding = [(0, batch_size - len(numbers)), (0, 0)]
        yield {name: np.pad(array, padding) for name, array in windows.batch(numbers).items()}
