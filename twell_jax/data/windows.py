"""Fixed-length training examples cut from a token stream.

Window i predicts tokens `[i * length + 1, (i + 1) * length + 1)` of the stream from the ones
before them, so that every token but the first is a target of exactly one window. A
window holds several documents, or parts of them, as segments: attention does not cross
them and positions restart. The first token of a document is no target, since what stands
before it is another document's separator.

Windows are addressed by number and hold no state: order, resume and the split over
processes are arithmetic on numbers.
"""

from collections.abc import Sequence

import numpy as np

from twell_jax.data.store import TokenStream
from twell_jax.errors import DataError


class TokenWindows:
    """A random-access source of examples, as Grain reads it."""

    def __init__(self, stream: TokenStream, length: int):
        """Raises DataError if the stream is too short for a single target."""
        if stream.num_tokens < 2:
            raise DataError(f"a split needs at least 2 tokens, this one has {stream.num_tokens}")
        self._stream = stream
        self._length = length

    def __len__(self) -> int:
        return -(-(self._stream.num_tokens - 1) // self._length)

    def __repr__(self) -> str:
        return f"TokenWindows(num_tokens={self._stream.num_tokens}, length={self._length})"

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        """One example: the arrays of `batch` without their first axis."""
        return {name: array[0] for name, array in self.batch([number]).items()}

    def batch(self, numbers: Sequence[int]) -> dict[str, np.ndarray]:
        """Several examples: arrays `[len(numbers), length]`, zero beyond the stream's end.

        Made together, since per example Python would take longer than the work.

        - `inputs`, `targets`: int32 token ids.
        - `segment_ids`: int32; 1, 2, … for the documents of the window, 0 for padding.
        - `positions`: int32; restart at 0 with each segment.
        - `loss_mask`: bool, False where the target is padding or in another document.

        Raises:
          IndexError: there is no such window.
        """
        tokens = np.zeros((len(numbers), self._length + 1), np.int32)
        starts = np.zeros(tokens.shape, bool)
        sizes = np.zeros((len(numbers), 1), np.int32)
        for row, number in enumerate(numbers):
            number = int(number)
            if not 0 <= number < len(self):
                raise IndexError(f"window {number} of {len(self)}")
            first = number * self._length
            last = min(first + self._length + 1, self._stream.num_tokens)
            tokens[row, : last - first], starts[row, : last - first] = self._stream.read(
                first, last
            )
            sizes[row] = last - first - 1

        index = np.arange(self._length, dtype=np.int32)
        real = index < sizes
        begins = starts[:, :-1].copy()
        begins[:, 0] = True
        segment_begins = np.maximum.accumulate(np.where(begins, index, 0), axis=1)
        return {
            "inputs": tokens[:, :-1] * real,
            "targets": tokens[:, 1:] * real,
            "segment_ids": np.cumsum(begins, axis=1, dtype=np.int32) * real,
            "positions": (index - segment_begins) * real,
            "loss_mask": ~starts[:, 1:] & real,
        }
