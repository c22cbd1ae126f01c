"""Starts commands many times at the price of one: their imports take longer than most tests.

A server process imports what they need, and forks for every start; no device is in use before
that, so that a command may still choose its devices.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]

_SERVER = """
import json, os, runpy, sys
import pytest
import twell_jax.data.preparation, twell_jax.training.flags, twell_jax.training.loop

for line in sys.stdin:
    request = json.loads(line)
    if "poll" in request:
        pid, status = os.waitpid(request["poll"], os.WNOHANG)
        print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        for number, path in ((1, request["out"]), (2, request["err"])):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.argv = request["argv"]
        try:
            if request["module"]:
                runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(sys.argv[0], run_name="__main__")
            code = 0
        except SystemExit as exit:
            if isinstance(exit.code, str):
                print(exit.code, file=sys.stderr)
            code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        except BaseException:
            import traceback
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(pid, flush=True)
"""


class Run:
    """A started command; as much of `subprocess.Popen` as the tests use."""

    def __init__(self, launcher, pid, folder):
        self.pid = pid
        self.returncode = None
        self._launcher, self._folder = launcher, folder

    def poll(self):
        if self.returncode is None:
            self.returncode = self._launcher.ask({"poll": self.pid})
        return self.returncode

    def send_signal(self, signum):
        os.kill(self.pid, signum)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def written(self):
        """(stdout, stderr) so far."""
        return tuple(
            path.read_text() if path.exists() else ""
            for path in (self._folder / "out", self._folder / "err")
        )

    def communicate(self, timeout=300):
        """Waits; returns (stdout, stderr)."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"it did not end: {self.written()}")
            time.sleep(0.01)
        return self.written()


class Launcher:
    """The server, started when it is first needed."""

    def __init__(self):
        self._server = None
        self._folder = tempfile.TemporaryDirectory()
        self._number = 0

    def ask(self, request):
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", _SERVER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                # Commands trace Triton kernels; that tests interpret them is these tests' affair.
                env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
            )
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def start(self, script, module, arguments) -> Run:
        self._number += 1
        folder = pathlib.Path(self._folder.name) / str(self._number)
        folder.mkdir()
        request = {
            "argv": [script, *map(str, arguments)],
            "module": module,
            "out": str(folder / "out"),
            "err": str(folder / "err"),
        }
        return Run(self, self.ask(request), folder)


_launcher = Launcher()


def start(*arguments) -> Run:
    """train.py with these arguments, in the background."""
    return _launcher.start(str(ROOT / "train.py"), "", arguments)


def run(*arguments) -> subprocess.CompletedProcess:
    """train.py with these arguments, to its end."""
    return _completed(start(*arguments), arguments)


def run_module(module, *arguments) -> subprocess.CompletedProcess:
    """`python -m module` with these arguments, to its end."""
    return _completed(_launcher.start(module, module, arguments), arguments)


def _completed(process, arguments):
    stdout, stderr = process.communicate()
    return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)
