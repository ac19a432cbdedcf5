"""The life of a process that scores and of the server that forks it, with a stand-in for what it loads."""

import gc
import os
import runpy
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest

from recsys import environment
from recsys.serving import fork_server, scoring_process
from recsys.serving.messages import Order, RowBatch
from recsys.serving.scoring_process import ScoringEndedError, ScoringProcess

ROOT = Path(__file__).parents[2]
ORDER = Order(Path("any"))
BATCH = RowBatch({}, 0, None)


def echo(connection, order: Order) -> None:
    """Stands in for a process that has loaded a package: it tells its parent, and answers each batch."""
    connection.send((order.folder.name, os.getpid(), os.getppid()))
    try:
        while True:
            connection.send(connection.recv())
    except EOFError:
        pass


@pytest.fixture
def light(monkeypatch):
    """Lets the server import little and its forks nothing; the one of other tests, if any, is left alone."""
    monkeypatch.setattr(fork_server, "_IMPORTS", "signal")
    monkeypatch.setattr(scoring_process, "_run", echo)
    private = forkserver.ForkServer()
    private.set_forkserver_preload(["signal"])
    for name in ("ensure_running", "connect_to_new_process", "set_forkserver_preload"):
        monkeypatch.setattr(forkserver, name, getattr(private, name))
    yield private
    private._stop()


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)


def test_processes_are_forks_of_the_same_server_and_take_no_signal_that_stops_it(light):
    processes = [ScoringProcess(ORDER) for _ in range(2)]
    loaded = [process.loaded for process in processes]
    assert {name for name, _, _ in loaded} == {"any"}
    assert {parent for _, _, parent in loaded} == {light._forkserver_pid}
    for sent in (signal.SIGINT, signal.SIGTERM):
        for receiver in (light._forkserver_pid, *(number for _, number, _ in loaded)):
            os.kill(receiver, sent)
    processes.append(ScoringProcess(ORDER))
    for process in processes:
        assert process.is_alive and process.score(BATCH) == BATCH
        process.close()
        assert not process.is_alive and process.ending == "has ended with exit code 0"


def test_a_killed_process_is_told_by_its_signal(light):
    process = ScoringProcess(ORDER)
    os.kill(process.loaded[1], signal.SIGKILL)
    with pytest.raises(ScoringEndedError, match="this process was ended by SIGKILL; the system does that if"):
        process.score(BATCH)
    assert not process.is_alive
    process.kill()


def test_without_its_server_a_process_counts_as_ended_and_the_next_one_gets_another_server(light):
    process = ScoringProcess(ORDER)
    os.kill(light._forkserver_pid, signal.SIGKILL)
    wait_until(lambda: not process.is_alive)
    later = ScoringProcess(ORDER)
    assert later.score(BATCH) == BATCH and later.loaded[2] != process.loaded[2]
    for ended in (process, later):
        ended.close()
        wait_until(lambda ended=ended: not alive(ended.loaded[1]))


PROGRAM = """
import sys, time
from recsys.serving import fork_server, scoring_process
from tests.serving.test_scoring_process import ORDER, echo

fork_server._IMPORTS = "signal"
scoring_process._run = echo
print(*scoring_process.ScoringProcess(ORDER).loaded[1:], flush=True)
if sys.argv[1] == "killed":
    time.sleep(60)
"""


@pytest.mark.parametrize("end", ["killed", "ends"])
def test_neither_process_outlives_what_started_it(end):
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, end],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    left = [int(number) for number in program.stdout.readline().split()]
    assert len(left) == 2
    if end == "killed":
        program.kill()
    program.communicate(timeout=60)
    wait_until(lambda: not any(map(alive, left)))


def test_processes_are_not_forked_where_there_may_be_a_gpu(monkeypatch):
    for version, method in (("580.1", "spawn"), ("unknown (NVML error 9)", "spawn"), (None, "forkserver")):
        monkeypatch.setattr(environment, "driver_version", lambda version=version: version)
        assert fork_server.context().get_start_method() == method


def test_an_import_of_the_server_may_fail(monkeypatch):
    asked = []

    def fail():
        asked.append(True)
        raise OSError("a library is broken")

    monkeypatch.setattr(environment, "import_torchrec_quietly", fail)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    runpy.run_module("recsys.serving.scoring_imports")
    assert asked
