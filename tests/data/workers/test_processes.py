"""Reader processes start early, and import what reading needs and no more."""

import pickle
import subprocess
import sys

import pytest

from recsys.data import loader
from recsys.data.schema.layout_rule import LayoutRule

PROGRAM = """
import sys
from recsys.data.workers import processes

processes.start_server()
print([name for name in ("torch", "pyarrow") if name in sys.modules])
names = ["recsys.data.workers.pool", "torch", "torchrec", "recsys.models"]
with processes.context().Pool(1, initializer=processes.leave_group) as pool:
    print(pool.apply(eval, (f"[name for name in {names} if name in __import__('sys').modules]",)))
"""


def test_the_command_imports_nothing_for_it_and_readers_neither_torch_nor_models():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["[]", "['recsys.data.workers.pool']"], done.stderr


class SentError(Exception):
    """Carries the bytes that would have gone to the reader processes."""


@pytest.mark.parametrize("pass_of", ["epoch", "epochs"])
def test_what_is_sent_to_them_brings_no_torch(sample, monkeypatch, pass_of):
    """An import of torch takes seconds, and the first batch would wait for it."""
    sample.write(sample.rows(9))
    sample.pipeline.data.num_workers = 1

    def sent(*args, **kwargs):
        raise SentError(pickle.dumps((args, kwargs)))

    monkeypatch.setattr(loader, "ReaderPool", sent)
    batches = loader.Loader.open(sample.pipeline, "train", LayoutRule(num_contextual=2))
    with pytest.raises(SentError) as caught:
        next(getattr(batches, pass_of)())
    program = "import pickle, sys; pickle.load(sys.stdin.buffer); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], input=caught.value.args[0], capture_output=True)
    assert done.stdout.split() == [b"False"], done.stderr.decode()


IMPORTING = """
import os, time
from multiprocessing import forkserver
from recsys.data.workers import processes

processes.start_server()
time.sleep(0.4)
os.kill(forkserver._forkserver._forkserver_pid, 2)
with processes.context().Pool(1, initializer=processes.leave_group) as pool:
    print(pool.apply(abs, (-7,)))
try:
    os.kill(os.getpid(), 2)
    time.sleep(5)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_while_the_server_imports_is_not_for_it():
    done = subprocess.run([sys.executable, "-c", IMPORTING], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("7\ninterrupted\n", "")


SQUARES = """
class Answer:
    def __init__(self, value):
        self.buffer = self.value = value

    def arrays(self):
        return self.value

class Squares:
    more_ahead = 0

    def __getitem__(self, place):
        return Answer(place[1] ** 2)
"""

SCRIPT = """
with open("imports", "a") as file:
    file.write(".")
{squares}
if __name__ == "__main__":
    from recsys.data.workers.pool import ReaderPool

    for _ in range(2):
        pool = ReaderPool(Squares(), [(0, 3), (0, 4)], 2, 1)
        print(list(pool))
        pool.close()
    print(__file__.endswith("script.py"))
"""


@pytest.mark.parametrize(
    ("squares", "imports"), [("from squares import Squares", 1), (SQUARES, 5)], ids=["module", "script"]
)
def test_they_import_the_script_that_runs_only_if_the_reader_needs_it(tmp_path, squares, imports):
    """A script that trains imports torch, for which each reader of each evaluation would wait."""
    (tmp_path / "squares.py").write_text(SQUARES)
    (tmp_path / "script.py").write_text(SCRIPT.format(squares=squares))
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    printed = done.stdout.splitlines()
    assert printed == ["[9, 16]", "[9, 16]", "True"], done.stderr
    assert len((tmp_path / "imports").read_text()) == imports
