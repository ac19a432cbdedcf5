"""Provides an argument parser that answers a mistake with one line that suggests what was meant.

All commands and the tools of `scripts/` use it. It imports only Python's standard library, and argcomplete if
a shell asks for completions.
"""

import argparse
import difflib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from recsys import environment
from recsys.errors import shortened

COMPLETING = "_ARGCOMPLETE"
"""Environment variable by which a shell asks for completions; it holds the number of words before the
arguments."""

MOST = 10**12
"""Largest integer that a flag accepts; its products with units of time still fit into 64 bits."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that suggests the nearest flag for an unknown one, and completes in a shell."""

    def parse_args(self, args=None, namespace=None):
        """Parses arguments; if a shell asks for completions, prints them and ends the process."""
        if COMPLETING in os.environ:
            _complete(self)
        self._arguments = sys.argv[1:] if args is None else list(args)
        self._require_values()
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Prints the mistake and ends the process with exit code 2."""
        if message.startswith("the following arguments are required"):
            message = self._unrecognized() or message
        unknown = message.removeprefix("unrecognized arguments: ").split()
        flags = re.findall(r"(?<![\w-])--[a-z][a-z-]*", self.format_help())
        hints = []
        for argument in unknown if unknown != message.split() else ():
            near = difflib.get_close_matches(argument.partition("=")[0], flags, n=1)
            hints += [f"Did you mean {near[0]}? "] if near and argument.startswith("-") else []
        self.exit(2, f"{self.prog}: {message}. {''.join(hints)}--help lists the flags.\n")

    def _require_values(self) -> None:
        """Ends the process if a flag has an empty value, as `--run-dir "$DIR"` has if the variable is unset.

        An empty path would stand for the current folder.
        """
        for place, argument in enumerate(self._arguments):
            flag, equals, value = argument.partition("=")
            if not argument and place:
                flag = self._arguments[place - 1]
            if flag.startswith("--") and not value and (equals or not argument):
                self.error(f"argument {flag}: its value is empty")

    def _unrecognized(self) -> str | None:
        """Returns argparse's message about unknown arguments, which argparse itself does not check while a
        required flag is missing: that flag may be there, but misspelled."""
        for action in self._actions:
            action.required = False
        unknown = self.parse_known_args(self._arguments)[1]
        return f"unrecognized arguments: {' '.join(unknown)}" if unknown else None


class PrintVersions(argparse.Action):
    """Prints versions without importing the libraries."""

    def __init__(self, option_strings, dest, help=None):
        super().__init__(
            option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0, help=help
        )

    def __call__(self, parser, namespace, values, option_string=None):
        print("\n".join(f"{name} {version}" for name, version in environment.versions().items()))
        parser.exit()


def split_command(parser: Parser, names: Iterable[str], arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the command that the first argument names, and the arguments after it.

    The command itself parses these arguments, so that a misspelled flag is compared with the command's flags.

    Args:
        parser: parses the flags that may replace a command, such as --help.
        names: names of the commands.
    """
    names = list(names)
    if COMPLETING in os.environ:
        return _command_of_shell(parser, names), []
    if not arguments:
        parser.exit(2, f"{parser.prog}: no command is given. Commands: {', '.join(names)}.\n")
    parser.add_argument("command", metavar="COMMAND", help=argparse.SUPPRESS)
    name = parser.parse_args(arguments[:1]).command
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        parser.exit(2, f"{parser.prog}: no command {name!r}. {hint}Commands: {', '.join(names)}.\n")
    return name, list(arguments[1:])


def _command_of_shell(parser: Parser, names: list[str]) -> str:
    """Returns the command in the line that a shell completes; completes the command itself if it is
    missing."""
    from argcomplete.lexers import split_line

    words = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))[3]
    first = int(os.environ[COMPLETING])
    if len(words) <= first or words[first] not in names:
        parser.add_argument("command", choices=names)
        _complete(parser)
    os.environ[COMPLETING] = str(first + 1)
    return words[first]


def _complete(parser: Parser) -> None:
    """Prints the completions that a shell asks for and ends the process."""
    import argcomplete

    argcomplete.autocomplete(parser)


def closed_pipe() -> int:
    """Drops the rest of the output, which is no longer read (`| head`), and returns exit code 141."""
    # Without this, Python would complain about the closed pipe when it exits.
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def positive(text: str) -> int:
    """Parses an argument that must be an integer from 1 to `MOST`; for `type=`."""
    if not text.isdecimal() or not text.isascii() or not text.strip("0"):
        raise argparse.ArgumentTypeError(f"{shortened(text)} is not an integer above 0")
    if len(text) > len(str(MOST)) or int(text) > MOST:
        raise argparse.ArgumentTypeError(f"{shortened(text)} is too large; give at most {MOST}")
    return int(text)


def between(least: float, most: float, kind: type[int] | type[float] = int) -> Callable[[str], float]:
    """Returns the `type` of an argument that must be a number from `least` to `most`."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = float("nan")
        if not least <= value <= most:
            noun = "an integer" if kind is int else "a number"
            problem = f"{shortened(text)} is not {noun} from {least:.12g} to {most:.12g}"
            raise argparse.ArgumentTypeError(problem)
        return value

    return parse
