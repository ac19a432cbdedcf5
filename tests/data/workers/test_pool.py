"""Reader processes hand over every batch in order, go ahead by so much and no more, and never outlive us."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recsys.data.convert.packer import BatchArrays
from recsys.data.workers.pool import ReaderPool
from recsys.errors import DataError, RecsysError


class Answer:
    """Stands for a batch on its way."""

    def __init__(self, value: object):
        self.value = self.buffer = value

    def arrays(self) -> object:
        return self.value


class Squares:
    """A reader whose batch (epoch, index) is index squared, or an error; a folder gets a mark of each."""

    more_ahead = 0

    def __init__(self, folder: Path, bad: dict[int, Exception] | None = None):
        self.folder = folder
        self.bad = bad or {}

    def __getitem__(self, place: tuple[int, int]) -> Answer | RecsysError:
        (self.folder / str(place[1])).touch()
        error = self.bad.get(place[1])
        if isinstance(error, RecsysError):
            return error
        if error is not None:
            raise error
        return Answer(place[1] ** 2)


def pool_of(reader: Squares, count: int, num_processes: int, ahead: int = 2) -> ReaderPool:
    return ReaderPool(reader, [(0, index) for index in range(count)], num_processes, ahead)  # type: ignore


def taken(pool: ReaderPool) -> list[BatchArrays]:
    try:
        return list(pool)
    finally:
        pool.close()


@pytest.mark.parametrize(("count", "num_processes"), [(0, 1), (1, 1), (7, 1), (7, 2), (8, 3), (2, 3)])
def test_batches_come_in_order(tmp_path, count, num_processes):
    assert taken(pool_of(Squares(tmp_path), count, num_processes)) == [i * i for i in range(count)]


def test_processes_go_ahead_by_so_much_and_no_more(tmp_path):
    pool = pool_of(Squares(tmp_path), 40, 2, ahead=3)
    batches = iter(pool)
    try:
        assert [next(batches), next(batches)] == [0, 1]
        # Each process has one batch taken, three that wait, and one read that cannot be sent yet.
        expected = set(range(2 * (1 + 3 + 1)))
        deadline = time.monotonic() + 10
        while {int(name) for name in os.listdir(tmp_path)} != expected and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)
        assert {int(name) for name in os.listdir(tmp_path)} == expected
    finally:
        pool.close()


def test_a_known_error_arrives_in_its_turn(tmp_path):
    pool = pool_of(Squares(tmp_path, {3: DataError("x.parquet, row 5: bad")}), 8, 2)
    results = []
    with pytest.raises(DataError, match=r"x.parquet, row 5: bad"):
        for batch in pool:
            results.append(batch)
    pool.close()
    assert results == [0, 1, 4]


def test_an_unknown_error_names_the_process(tmp_path):
    pool = pool_of(Squares(tmp_path, {2: ZeroDivisionError("surprise")}), 8, 2)
    with pytest.raises(RecsysError, match=r"a reader process died \(pid \d+, exit code 1\)"):
        taken(pool)


PROGRAM = """
import sys, time
from pathlib import Path
from tests.data.workers.test_pool import Squares, pool_of

if __name__ == "__main__":
    pool = pool_of(Squares(Path(sys.argv[1])), 1000, 2)
    next(iter(pool))
    print(*[process.pid for process in pool._processes], flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks for processes in /proc")
def test_no_process_outlives_one_that_is_killed(tmp_path):
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2 and all(map(alive, pids))
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
