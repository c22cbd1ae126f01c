"""`sparse_ffn` on Hopper."""

import functools

from pallas_kernels import packed_ffn
from pallas_kernels.mosaic_gpu import consumer
from pallas_kernels.mosaic_gpu.device import require_hopper
from pallas_kernels.mosaic_gpu.gate import GateConfig, gate_words
from pallas_kernels.packed_ffn import Kernels
from pallas_kernels.shapes import check_weights, pad_columns

NAME = "mosaic_gpu"


def pack(x, w, token_mask, *, interpret=None):
    """`Kernels.pack`."""
    return gate_words(x, w, token_mask, config=GateConfig(), interpret=interpret)


def make_lists(words, lengths, capacity):
    """`Kernels.make_lists`: the consumer reads words, and leaves out rows that lost entries."""
    del lengths, capacity
    return words


def up_down(words, x, w_up, w_down, start, *, interpret=None):
    """`Kernels.up_down` of words; pads D to what the kernel serves."""
    width = w_down.shape[1]
    x, w_up, w_down, start = (
        None if array is None else pad_columns(array, consumer.ROW_MULTIPLE)
        for array in (x, w_up, w_down, start)
    )
    config = consumer.default_config(w_down.shape[1], words.shape[1], words.shape[2] - 1)
    y, norm = consumer.up_down(words, x, w_up, w_down, start, config=config, interpret=interpret)
    return y[:, :width], norm


def kernels(interpret=None) -> Kernels:
    """The kernels, as they run or in the interpreter."""
    return Kernels(
        functools.partial(pack, interpret=interpret),
        make_lists,
        functools.partial(up_down, interpret=interpret),
    )


sparse_ffn = packed_ffn.make_sparse_ffn(kernels())


def check_sparse_ffn(x, w_gate, w_up, w_down, token_mask, *, dense_band=0) -> None:
    """Raises NotImplementedError if these kernels cannot serve the arguments here."""
    del w_gate, w_down, token_mask, dense_band
    require_hopper()
    check_weights(NAME, x, w_up)
