"""Portable GPU kernels, written in Triton and called through jax-triton (an optional extra)."""
