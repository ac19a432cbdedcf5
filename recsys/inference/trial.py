"""Runs a new package in a process of its own, which shares nothing with the process that made it.

The process starts before the package is compiled and imports meanwhile what takes it many seconds.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from safetensors.torch import load_file

from recsys.config import extensions
from recsys.inference.package import Package

TRIAL = ".trial"
"""Folder within a package with the inputs and outputs to compare; it is removed afterwards."""

ITEM_TRIAL = f"{TRIAL}/items.safetensors"


class Trial:
    """A process that will run a package; it ends with the `with` block.

    Args:
        folder: folder of the package, which may still be empty.
        modules: modules that extend the config language.
    """

    def __init__(self, folder: Path, modules: Sequence[str]) -> None:
        command = [sys.executable, "-m", __name__, str(folder), *modules]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def __enter__(self) -> "Trial":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._process:
            self._process.kill()

    def run(self) -> subprocess.CompletedProcess[str]:
        """Compares the package, which is complete by now; the last line of the output is a list of the
        differences of each batch, then of the item tower."""
        output, errors = self._process.communicate("compare\n")
        return subprocess.CompletedProcess(self._process.args, self._process.returncode, output, errors)


def why_it_failed(done: subprocess.CompletedProcess[str]) -> str:
    """Returns the error message of a failed process, without the stack that C++ may have printed after it.

    Where a compiled program failed, Python's message only says so, and the program has printed the cause.
    """
    lines = done.stderr.strip().splitlines() or [f"it ended with {done.returncode} and no message"]
    why = next((line for line in reversed(lines) if re.match(r"[\w.]+(Error|Exception): ", line)), lines[-1])
    cause = next((line.removeprefix("Error: ") for line in lines if line.startswith("Error: ")), None)
    return why if cause is None else f"{why}: {cause}"


def differences(folder: Path) -> Iterator[list[float]]:
    """Yields the differences for each batch of the trial, then for the item tower."""
    loaded = Package(folder, check_golden=False)
    items = folder / ITEM_TRIAL
    for path in sorted((folder / TRIAL).iterdir()):
        if path != items:
            yield loaded.differences(load_file(path))
    yield [loaded.item_difference(load_file(items))] if items.exists() else []


if __name__ == "__main__":
    extensions.load(sys.argv[2:])
    # Nothing comes if the export has failed or was ended.
    if sys.stdin.readline():
        print(json.dumps(list(differences(Path(sys.argv[1])))))
