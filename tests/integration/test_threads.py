"""A package in several threads and in a forked process."""

import os
import threading
import time

import pyarrow.parquet as pq
import pytest

from recsys.inference.package import Package
from recsys.inference.predictor import Predictor
from recsys.inference.program import PackageError


def ask(predictor, tables, answers, seconds, counts, wrong):
    """Scores the tables again and again and notes answers that are not those of a single thread."""
    end, number = time.monotonic() + seconds, threading.get_ident()
    while time.monotonic() < end:
        number += 1
        if not predictor.table(tables[number % len(tables)]).equals(answers[number % len(tables)]):
            wrong.append(number % len(tables))
        counts.append(1)


@pytest.mark.parametrize("seconds", [1.5, pytest.param(600, marks=pytest.mark.slow)])
def test_eight_threads_get_the_answers_of_one(ranker, seconds):
    predictor, rows = Predictor(Package(ranker.package)), pq.read_table(ranker.rows)
    tables = [rows.slice(start, length) for start, length in ((0, 1), (7, 5), (20, 40), (3, 2), (70, 1))]
    # A GPU replays a recorded graph from the third call with equal sizes on, whose last bits may be others.
    answers = [[predictor.table(table) for _ in range(3)][-1] for table in tables]
    counts, wrong = [], []
    threads = [
        threading.Thread(target=ask, args=(predictor, tables, answers, seconds, counts, wrong), daemon=True)
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert len(counts) >= 16


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_fork_of_the_process_that_loaded_a_package_cannot_use_it(ranker):
    """Otherwise it would wait without end for threads that it does not have."""
    predictor, rows = Predictor(Package(ranker.package)), pq.read_table(ranker.rows).slice(0, 2)
    predictor.table(rows)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            predictor.table(rows)
            os.write(write, b"answered")
        except PackageError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        assert "a package cannot be used in a fork" in said.read()
    os.waitpid(child, 0)
