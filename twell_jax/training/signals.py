"""Ending a run on SIGTERM or SIGINT: once politely, twice at once."""

import contextlib
import os
import signal
import threading


class StoppedBySignalError(RuntimeError):
    """The run was asked to stop, saved its state and stopped.

    Attributes:
      signum: the signal.
    """

    def __init__(self, signum: int, step: int | None = None):
        done = "stopped; nothing was left to save"
        if step is not None:
            done = f"saved and stopped after step {step}"
        super().__init__(f"{signal.Signals(signum).name}: {done}")
        self.signum = signum


class StopSignals:
    """While it is entered, takes SIGTERM and SIGINT; a second one ends the process at once.

    The first one raises StoppedBySignalError, or within `deferred()` is only noted.
    """

    def __init__(self):
        self.received: int | None = None
        self._deferred = False
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

    @contextlib.contextmanager
    def deferred(self):
        """There is something to save: whoever saves it looks at `received`."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def _handle(self, signum, _frame):
        if self.received is not None:
            os._exit(128 + signum)
        self.received = signum
        if not self._deferred:
            raise StoppedBySignalError(signum)
