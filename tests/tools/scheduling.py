"""Divides test files over the workers of pytest-xdist."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from xdist.scheduler.loadfile import LoadFileScheduling

SERVERS = {
    "interpreter": re.compile(r"^test_\w+ = (\w+\.)?interpreter_test\(|\brun_interpreted\(", re.MULTILINE),
    "forks": re.compile(
        r"(?<![.\w])(forks\.)?(run_ranks|start_command|start|serving|said_by_serve|server)\("
    ),
}
"""By server of `tests.tools.forks`: what is in the files whose tests use it."""


@functools.cache
def server_of(path: Path) -> str | None:
    """Returns the name of the server that tests of a file use."""
    text = path.read_text(encoding="utf-8")
    return next((name for name, use in SERVERS.items() if use.search(text)), None)


class SchedulingByServer(LoadFileScheduling):
    """A worker runs all tests of a file, and of all files that use the same server.

    A server spends seconds of CPU time on imports, and each worker would start its own.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return server_of(self.config.rootpath / file) or file
