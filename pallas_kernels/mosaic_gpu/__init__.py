"""Mosaic GPU kernels, for Hopper."""
