"""`matmul_pack` and `twell_matmul` on Hopper, with the gradients of the reference."""

import jax

from pallas_kernels.mosaic_gpu import consumer, gate
from pallas_kernels.mosaic_gpu.device import SMEM_BYTES, require_hopper
from pallas_kernels.mosaic_gpu.ffn import up_down
from pallas_kernels.packed_matmuls import make_matmul_pack, make_twell_matmul
from pallas_kernels.shapes import check_weights
from pallas_kernels.twell import Twell
from pallas_kernels.words import from_twell, to_twell


def check_matmul_pack(x, w, tile, slots) -> None:
    """Raises NotImplementedError if these kernels cannot serve the arguments here."""
    require_hopper()
    check_weights("mosaic_gpu", x, w)
    if tile != gate.TILE:
        raise NotImplementedError(f"backend 'mosaic_gpu' packs tiles of {gate.TILE}, got {tile}")
    if slots > gate.MAX_SLOTS or (slots + 1) % 4:
        raise NotImplementedError(
            f"backend 'mosaic_gpu' packs 3, 7, 11, ... {gate.MAX_SLOTS} slots, got {slots}"
        )


def packed(x, w, tile: int, slots: int, *, interpret=None) -> Twell:
    """`relu(x w')` in the public form; x is `[M, D]`."""
    words, _ = gate.gate_words(x, w, None, config=gate.GateConfig(slots=slots), interpret=interpret)
    return to_twell(words, num_neurons=w.shape[0], tile=tile)


def check_twell_matmul(twell: Twell, w) -> None:
    """Raises NotImplementedError if the kernel cannot serve the arguments here."""
    require_hopper()
    check_weights("mosaic_gpu", twell, w)
    if twell.slots >= consumer.MAX_ROW_WORDS:
        raise NotImplementedError(
            f"backend 'mosaic_gpu' serves tiles of up to {consumer.MAX_ROW_WORDS - 1} slots, "
            f"got {twell.slots}"
        )
    if consumer.smem_bytes(twell.num_tiles, twell.slots + 3) > SMEM_BYTES:
        raise NotImplementedError(
            f"backend 'mosaic_gpu' cannot hold a row of {twell.num_tiles} tiles of {twell.slots} "
            "slots in shared memory"
        )


def multiplied(twell: Twell, w, *, interpret=None) -> jax.Array:
    """`unpack(twell) w`, rows that overflowed being 0."""
    return up_down(from_twell(twell), None, None, w, None, interpret=interpret)[0]


matmul_pack = make_matmul_pack(packed)
twell_matmul = make_twell_matmul(multiplied)
