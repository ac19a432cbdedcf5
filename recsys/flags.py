"""An argument parser that answers a mistake with one line that says what was meant.

Used by `cli`, `doctor`, `prepare` and the tools of `scripts/`. Needs only Python's standard library.
"""

import argparse
import difflib
import re
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that suggests the nearest flag for an unknown one."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with exit code 2."""
        unknown = message.removeprefix("unrecognized arguments: ").split()
        known = re.findall(r"(?<![\w-])--[a-z][a-z-]*", self.format_help())
        hints = []
        for given in unknown if unknown != message.split() else ():
            near = difflib.get_close_matches(given.partition("=")[0], known, n=1)
            hints += [f"Did you mean {near[0]}? "] if near and given.startswith("-") else []
        self.exit(2, f"{self.prog}: {message}. {''.join(hints)}--help lists the flags.\n")


def positive(text: str) -> int:
    """The `type` of an argument that must be an integer above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer above 0")
    return int(text)
