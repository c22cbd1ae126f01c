"""Fixed-length training examples cut from a token stream.

Window i predicts tokens `[i * length + 1, (i + 1) * length + 1)` of the stream from the ones
before them, so that every token but the first is a target of exactly one window. A
window holds several documents, or parts of them, as segments: attention does not cross
them and positions restart. The first token of a document is no target, since what stands
before it is another document's separator.

Windows are addressed by number and hold no state: order, resume and the split over
processes are arithmetic on numbers.
"""

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
        """One example: int32 arrays of `length`, padded with zeros at the stream's end.

        - `inputs`, `targets`: token ids.
        - `segment_ids`: 1, 2, … for the documents of the window, 0 for padding.
        - `positions`: restart at 0 with each segment.
        - `loss_mask`: bool, False where the target is padding or in another document.
        """
        number = int(number)
        if not 0 <= number < len(self):
            raise IndexError(f"window {number} of {len(self)}")
        first = number * self._length
        last = min(first + self._length + 1, self._stream.num_tokens)
        tokens, starts = self._stream.read(first, last)
        size = len(tokens) - 1

        index = np.arange(size)
        begins = starts[:-1].copy()
        begins[0] = True
        example = {
            "inputs": tokens[:-1],
            "targets": tokens[1:],
            "segment_ids": np.cumsum(begins),
            "positions": index - np.maximum.accumulate(np.where(begins, index, 0)),
            "loss_mask": ~starts[1:],
        }
        return {name: self._pad(array) for name, array in example.items()}

    def _pad(self, array):
        dtype = bool if array.dtype == bool else np.int32
        padded = np.zeros(self._length, dtype)
        padded[: len(array)] = array
        return padded
