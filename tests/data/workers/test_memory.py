"""A process that keeps its memory does not ask the system for it again."""

import platform
import subprocess
import sys

import pytest

PASSES, SETTLED, PIECES, SIZE = 40, 10, 8, 3 << 20
PROGRAM = f"""
import resource
import numpy as np
import pyarrow as pa
from recsys.data.workers import memory

memory.keep_freed_memory()
for i in range({PASSES}):
    if i == {SETTLED}:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [np.ones({SIZE}, np.uint8) for _ in range({PIECES})]
    tables = [pa.allocate_buffer({SIZE}) for _ in range({PIECES})]
    for table in tables:
        np.frombuffer(table, np.uint8)[:] = 1
    del held, table, tables
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(program: str) -> int:
    actual = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True)
    return int(actual.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_memory_that_was_freed_is_used_again():
    # The system may move pages now and then, which counts as well.
    assert page_faults(PROGRAM) < page_faults(PROGRAM.replace("memory.keep_freed_memory()", "")) / 4
