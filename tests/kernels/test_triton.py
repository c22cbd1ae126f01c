"""The Triton kernels without a GPU: compiled for five kinds of them, and refused on a CPU.

`test_interpreted` runs them.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import pytest

from pallas_kernels import pack
from pallas_kernels.triton_gpu import device, ffn, matmuls


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_compile_for_every_kind_of_gpu():
    """In a process of its own: triton is not imported where JAX is in use."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton_compiled"],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        cwd=pathlib.Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.count("bytes of shared memory") == 5 * 2 * (4 + 2 * 6)


class FakeGpu:
    """A device with a name and a compute capability."""

    platform = "gpu"

    def __init__(self, capability, name="Some GPU"):
        self.compute_capability, self.device_kind = capability, name


def test_what_is_not_served_is_refused(monkeypatch):
    x, w = jnp.zeros((2, 64), jnp.bfloat16), jnp.zeros((128, 64), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="'triton' needs an NVIDIA GPU, found cpu"):
        ffn.check_sparse_ffn(x, w, w, w, None)
    monkeypatch.setattr(device.jax, "devices", lambda: [FakeGpu("7.5", "Tesla T4")])
    with pytest.raises(NotImplementedError, match=r"8\.0 or newer, found Tesla T4 \(7\.5\)"):
        ffn.check_sparse_ffn(x, w, w, w, None)
    monkeypatch.setattr(device.jax, "devices", lambda: [FakeGpu("10.0")])
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(NotImplementedError, match="needs jax-triton, which is not installed"):
        ffn.check_sparse_ffn(x, w, w, w, None)
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda _: "there")
    with monkeypatch.context() as newer:
        newer.setattr(device.importlib.metadata, "version", lambda _: "0.4.1")
        newer.setattr(device.jax, "__version_info__", (0, 12, 0))
        with pytest.raises(NotImplementedError, match=r"jax-triton 0\.4\.1 does not work with jax"):
            ffn.check_sparse_ffn(x, w, w, w, None)
        newer.setattr(device.importlib.metadata, "version", lambda _: "0.5")
        ffn.check_sparse_ffn(x, w, w, w, None)
    ffn.check_sparse_ffn(x, w, w, w, None)
    with pytest.raises(NotImplementedError, match="'mosaic_triton' needs a Hopper GPU"):
        ffn.check_sparse_ffn_on_hopper(x, w, w, w, None)
    with pytest.raises(NotImplementedError, match="'triton' serves bfloat16, got float32"):
        ffn.check_sparse_ffn(x.astype(jnp.float32), w, w, w, None)
    with pytest.raises(NotImplementedError, match=r"packs tiles of .* got 96"):
        matmuls.check_matmul_pack(x, w, 96, 8)
    many_tiles = pack(jnp.zeros((1, 65536), jnp.bfloat16), tile=2, slots=1)
    with pytest.raises(NotImplementedError, match="serves up to 16384 tiles, got 32768"):
        matmuls.check_twell_matmul(many_tiles, jnp.zeros((65536, 64), jnp.bfloat16))
