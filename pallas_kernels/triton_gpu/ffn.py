"""`sparse_ffn` by Triton kernels, and by the faster kernel of each kind on Hopper."""

from pallas_kernels import packed_ffn
from pallas_kernels.mosaic_gpu.device import require_hopper
from pallas_kernels.mosaic_gpu.gate import GateConfig, gate_words
from pallas_kernels.packed_ffn import Kernels
from pallas_kernels.shapes import check_weights
from pallas_kernels.triton_gpu import backward, launch
from pallas_kernels.triton_gpu.device import require_triton


def _pack(x, w, token_mask):
    return launch.pack_words(x, w, token_mask, config=launch.PackConfig())


def _pack_by_mosaic(x, w, token_mask):
    return gate_words(x, w, token_mask, config=GateConfig())


KERNELS = Kernels(_pack, launch.make_lists, launch.up_down, backward.gradients)

# On an H200 Mosaic GPU packs faster, and Triton reads the weights' rows faster.
KERNELS_ON_HOPPER = KERNELS._replace(pack=_pack_by_mosaic)

sparse_ffn = packed_ffn.make_sparse_ffn(KERNELS)
sparse_ffn_on_hopper = packed_ffn.make_sparse_ffn(KERNELS_ON_HOPPER)


def check_sparse_ffn(
    x, w_gate, w_up, w_down, token_mask, *, dense_band=0, backend="triton"
) -> None:
    """Raises NotImplementedError if these kernels cannot serve the arguments here."""
    del w_gate, w_down, token_mask, dense_band
    require_triton(backend)
    check_weights(backend, x, w_up)


def check_sparse_ffn_on_hopper(*arguments, dense_band=0) -> None:
    """The same for the kernels of both kinds."""
    require_hopper("mosaic_triton")
    check_sparse_ffn(*arguments, dense_band=dense_band, backend="mosaic_triton")
