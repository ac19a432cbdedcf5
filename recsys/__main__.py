"""Runs the console command `recsys`: `recsys train ...` is `python -m recsys.train ...`, and so on.

A new command is one line of `COMMANDS`; its module has `main(arguments)`, which returns the exit code. A
command's module is imported only when the command is chosen, so `recsys --help` answers at once.
"""

import importlib
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from typing import NamedTuple

from recsys.flags import Parser, PrintVersions, closed_pipe, split_command


class Command(NamedTuple):
    """A sub-command of `recsys`.

    Attributes:
        module: dotted name; its `main(arguments)` runs the command.
        summary: one line for `recsys --help`.
    """

    module: str
    summary: str


COMMANDS = {
    "install": Command("recsys.install", "install the torch, fbgemm and torchrec that fit this machine"),
    "doctor": Command("recsys.doctor", "check the installation and say what to type if it is broken"),
    "init": Command("recsys.init", "start a project: sample data, a config, and a README with the commands"),
    "prepare": Command("recsys.prepare.__main__", "make training data from an event log"),
    "sid": Command("recsys.sid.__main__", "make semantic ids: short codes for items"),
    "train": Command("recsys.train", "train a model, or continue a run that stopped"),
    "evaluate": Command("recsys.evaluate", "measure a trained model on a split"),
    "sweep": Command("recsys.sweep", "train combinations of settings, compare them on validation"),
    "baseline": Command("recsys.baseline", "measure baselines that need no training"),
    "blend": Command("recsys.blend", "blend a trained model with item co-occurrence"),
    "export": Command("recsys.export", "compile a trained model into a package"),
    "compile-protos": Command("recsys.compile_protos", "compile the .proto files of your package"),
    "predict": Command("recsys.predict", "score or recommend with a package"),
    "serve": Command("recsys.serve", "score or recommend over HTTP with a package"),
}

COMPLETION = """\
Tab completion: add one line to ~/.bashrc or ~/.zshrc, or the last one to ~/.config/fish/config.fish:
  eval "$(register-python-argcomplete recsys)"
  register-python-argcomplete --shell fish recsys | source"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that the first argument names, with the arguments after it; returns its exit code."""
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items())
    parser = Parser(
        "recsys",
        usage="recsys COMMAND ...",
        description=f"Generative recommenders from event log to recommendations.\n\ncommands:\n{lines}\n\n"
        "`recsys COMMAND --help` lists the flags of a command.",
        epilog=COMPLETION,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=PrintVersions, help="print versions, stop")
    try:
        name, flags = split_command(parser, COMMANDS, sys.argv[1:] if arguments is None else arguments)
        return importlib.import_module(COMMANDS[name].module).main(flags)
    except BrokenPipeError:
        return closed_pipe()


if __name__ == "__main__":
    raise SystemExit(main())
