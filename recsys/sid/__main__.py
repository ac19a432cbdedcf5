"""Semantic ids: short codes for items, made once before training.

  embed   vectors of items, from texts, training events or a file
  fit     a quantizer and the codes of all items, as a bundle
  report  how good the codes of a bundle are
  append  codes for new items, with the codebooks of a bundle

`python -m recsys.sid embed --help` lists the flags of the first, and so on. Exit codes: 2 usage, 3 data,
5 a library is missing.
"""

from collections.abc import Sequence

from recsys.prepare.command import run_tool
from recsys.sid import command

TOOLS = {"embed": command.embed, "fit": command.fit, "report": command.report, "append": command.append}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tool that the first argument names with the flags after it, and returns the exit code."""
    return run_tool(command.PROGRAM, __doc__, TOOLS, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
