"""Starts processes of this package in milliseconds: forks of a server that has imported PyTorch and TorchRec.

A new Python spends seconds of CPU time on these imports. Tests that are about the start of a process use
`subprocess` instead. The server computes nothing, so that it has no other threads, which a fork would lack.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

IMPORTS = ("recsys.training.run", "recsys.training.distributed")
"""Modules that trainings and evaluations import."""


class Fork:
    """A process that calls a function; the part of `subprocess.Popen` that tests need."""

    def __init__(self, server: Server, pid: int, output: Path):
        self._server = server
        self._output = output
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative if a signal ended the process, or None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.ask({"poll": self.pid})
        return self.returncode

    def communicate(self, timeout: float = 120) -> tuple[str, None]:
        """Waits for the end of the process and returns what it wrote to stdout and stderr.

        Raises:
            TimeoutError: it runs for longer than `timeout` seconds; it is killed.
        """
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"the process has run for {timeout} s:\n{self.output()}")
            time.sleep(0.02)
        return self.output(), None

    def output(self) -> str:
        """Returns what the process has written so far; nothing if it was killed before it could write."""
        return self._output.read_text() if self._output.exists() else ""

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """A process that forks on request.

    Args:
        imports: modules to import once, for all forks.
        variables: environment of the server.
    """

    def __init__(self, imports: Sequence[str], **variables: str):
        self._folder = tempfile.TemporaryDirectory(prefix="forks-")
        self._count = 0
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", "from tests.tools import forks; forks.serve()", *imports]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | variables
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True
        )

    def start(
        self,
        target: str,
        *arguments: Any,
        cwd: Path | None = None,
        new_group: bool = False,
        shares_scoring_server: bool = False,
        **variables: str,
    ) -> Fork:
        """Calls `module:function` with arguments that JSON can hold; its result is the exit code.

        Args:
            target: the function.
            *arguments: its arguments.
            cwd: working folder.
            new_group: gives the process a group of its own.
            shares_scoring_server: processes that score are forked from a server that all such forks share,
                and that has done its imports. Else `recsys.serve` starts a server of its own for them.
            **variables: additional environment.
        """
        self._count += 1
        output = Path(self._folder.name) / f"{self._count}.txt"
        request = {"target": target, "arguments": arguments, "output": str(output), "new_group": new_group}
        request |= {"shares_scoring_server": shares_scoring_server}
        pid = self.ask(request | {"cwd": str(cwd or Path.cwd()), "variables": variables})
        return Fork(self, pid, output)

    @property
    def pid(self) -> int:
        """The process that forks."""
        return self._process.pid

    def ask(self, request: dict[str, Any]) -> Any:
        """Sends a request to the process and returns its answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, "the server of forks has ended; its error is above"
        return json.loads(answer)


@functools.cache
def server() -> Server:
    """The server of this test process, for trainings and evaluations."""
    return Server(IMPORTS, TORCH_CPP_LOG_LEVEL="ERROR")


def start_command(name: str, *arguments: object, **options: Any) -> Fork:
    """Starts `recsys.<name>`, a process for itself."""
    return server().start("tests.tools.forks:run_command", name, *map(str, arguments), **options)


def run_command(name: str, *arguments: str) -> int:
    """`python -m recsys.<name>`, in a fork."""
    sys.argv = [f"recsys.{name}", *arguments]
    return importlib.import_module(f"recsys.{name}").main()


def run_module(name: str, *arguments: str) -> None:
    """`python -m <name>`, in a fork; it ends with the exit code of the module."""
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def run_script(path: str, *arguments: str) -> None:
    """`python <path>`, in a fork; it ends with the exit code of the script."""
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent.resolve()))
    runpy.run_path(path, run_name="__main__")


def run_ranks(function: Callable[..., None], *arguments: Any, ranks: int = 2) -> None:
    """Calls a function of a module with a rank and the arguments in as many processes; waits for their end.

    Raises:
        AssertionError: one failed; the message is what it printed.
    """
    target = f"{function.__module__}:{function.__name__}"
    forks = [server().start(target, rank, *arguments) for rank in range(ranks)]
    outputs = [fork.communicate()[0] for fork in forks]
    assert [fork.returncode for fork in forks] == [0] * ranks, "\n".join(outputs)


# --- in the server ----------------------------------------------------------------------------------------


def serve() -> None:
    """Answers each line of stdin, until there are no more; in a fork, calls its function and exits."""
    gc.disable()
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()  # a collection would look at all of this, and copy its memory in each fork
    gc.enable()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            if request["shares_scoring_server"]:
                _start_scoring_server()
            answer = os.fork()
            if answer == 0:
                break
        print(json.dumps(answer), flush=True)
    else:
        return
    _become(request)
    module, function = request["target"].split(":")
    try:
        code = getattr(importlib.import_module(module), function)(*request["arguments"])
    except SystemExit as end:
        code = end.code
    _leave(code)


def _leave(code: int | str | None) -> None:
    """Ends a fork as `sys.exit` does, without the last step: Python would destroy all modules, and so copy
    the memory of a million objects that the fork shares with the server."""
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if isinstance(code, str) else (code or 0) & 0xFF)


def _start_scoring_server() -> None:
    """Starts the server from which processes that score are forked, if it is not running."""
    # Forks need not import what serves HTTP.
    from recsys.serving import fork_server, server  # noqa: F401

    fork_server.context()
    with fork_server.signals_blocked():
        forkserver.ensure_running()


def _become(request: dict[str, Any]) -> None:
    """Gives a fork its own input, output, folder and variables."""
    if request["new_group"]:
        os.setsid()
    # The tracker, if it runs, is no child of this fork.
    resource_tracker._resource_tracker._pid = None
    if request["shares_scoring_server"]:
        # Nor is this server, and multiprocessing would start another one.
        forkserver._forkserver.ensure_running = lambda: None
    else:
        forkserver._forkserver.__init__()
    for descriptor, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["output"], os.O_WRONLY | os.O_CREAT),
    ):
        os.dup2(os.open(path, flags), descriptor)
    os.dup2(1, 2)
    os.chdir(request["cwd"])
    os.environ.update(request["variables"])
