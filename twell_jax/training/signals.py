"""Ending a run on SIGTERM or SIGINT: once politely, twice at once."""

import os
import signal
import threading


class StoppedBySignalError(RuntimeError):
    """The run was asked to stop, saved its state and stopped.

    Attributes:
      signum: the signal.
    """

    def __init__(self, signum: int, step: int):
        super().__init__(f"{signal.Signals(signum).name}: saved and stopped after step {step}")
        self.signum = signum


class StopSignals:
    """While it is entered, notes the first SIGTERM or SIGINT; a second one ends the process."""

    def __init__(self):
        self.received: int | None = None
        self._previous = {}

    def __enter__(self):
        # Only the main thread may handle signals; elsewhere they stay with their owner.
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGTERM, signal.SIGINT):
                self._previous[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *_):
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _handle(self, signum, _frame):
        if self.received is not None:
            os._exit(128 + signum)
        self.received = signum
