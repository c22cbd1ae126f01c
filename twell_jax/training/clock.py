"""Timing of steps."""

import time

import numpy as np

# Steps left out of the timing: the first ones compile.
_UNTIMED_STEPS = 5
_RECENT_STEPS = 20


class StepClock:
    """Seconds between finished steps, without compilation and pauses."""

    def __init__(self):
        self.step_seconds: list[float] = []
        self._last: float | None = None
        self._to_skip = _UNTIMED_STEPS

    def restart(self) -> None:
        """What happened since the last tick is not a step's time."""
        self._last = None

    def tick(self) -> None:
        """A step has finished."""
        now = time.perf_counter()
        if self._to_skip:
            self._to_skip -= 1
        elif self._last is not None:
            self.step_seconds.append(now - self._last)
        self._last = now

    def recent_step_seconds(self) -> float | None:
        """Median over the last steps, or None before the first timed one."""
        recent = self.step_seconds[-_RECENT_STEPS:]
        return float(np.median(recent)) if recent else None
