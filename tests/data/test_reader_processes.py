"""Reader processes start early, and import what reading needs and no more."""

import signal
import subprocess
import sys

from recsys.data import reader_processes

PROGRAM = """
import sys
from recsys.data import reader_processes

reader_processes.start_server()
print([name for name in ("torch", "pyarrow") if name in sys.modules])
names = ["torch.utils.data", "recsys.data.reader", "torchrec", "recsys.models"]
with reader_processes.context().Pool(1) as pool:
    print(pool.apply(eval, (f"[name for name in {names} if name in __import__('sys').modules]",)))
"""


def test_the_command_imports_nothing_for_it_and_readers_neither_torchrec_nor_models():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["[]", "['torch.utils.data', 'recsys.data.reader']"], done.stderr


def test_an_interrupt_does_not_reach_readers():
    before = signal.getsignal(signal.SIGINT)
    try:
        reader_processes.ignore_interrupt(0)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
