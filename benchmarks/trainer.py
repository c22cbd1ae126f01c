"""Train steps under a clock, for the benchmarks that time them."""

import time

import jax

from twell_jax.training.state import initial_state
from twell_jax.training.step import make_train_step


class Trainer:
    """Runs steps and times them."""

    def __init__(self, config):
        self.step = jax.jit(make_train_step(config), donate_argnums=0)
        self.state = initial_state(config)
        self.host_seconds = []
        self.losses = []

    def run(self, next_batch, steps: int) -> list[float]:
        """Seconds between finished steps; metrics are read one step late, as in training."""
        finished, before, seconds = time.perf_counter(), None, []
        for _ in range(steps):
            start = time.perf_counter()
            batch = next_batch()
            self.state, metrics = self.step(self.state, batch)
            self.host_seconds.append(time.perf_counter() - start)
            if before is not None:
                self.losses.append(float(before["loss"]))
                now = time.perf_counter()
                seconds.append(now - finished)
                finished = now
            before = metrics
        self.losses.append(float(before["loss"]))
        return seconds
