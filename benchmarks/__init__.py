"""Measurements; their rows are under benchmarks/results/."""
