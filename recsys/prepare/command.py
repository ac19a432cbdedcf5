"""Implements the flags, inputs, exit codes and output folder that the preparation tools share."""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from recsys import files
from recsys.errors import ConfigError, RecsysError
from recsys.flags import Parser, closed_pipe, positive, split_command
from recsys.prepare.downloads import download, location
from recsys.prepare.starter_config import train_command

PROGRAM = "python -m recsys.prepare"


def run(main: Callable[[list[str] | None], None], arguments: list[str] | None = None) -> int:
    """Calls a tool's `main`; an error for users becomes a message and an exit code: 2 usage, 3 data."""
    try:
        main(arguments)
    except RecsysError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except BrokenPipeError:
        return closed_pipe()
    except OSError as error:
        # A full disk or a folder without permission: the system's own message says what to do.
        sys.stderr.write(f"error: {error}\n")
        return RecsysError.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; nothing was written\n")
        return 130
    return 0


def run_tool(
    program: str,
    description: str | None,
    tools: Mapping[str, Callable[[list[str] | None], None]],
    arguments: Sequence[str] | None,
) -> int:
    """Runs the tool that the first argument names with the flags after it, and returns the exit code.

    Args:
        program: name of the command in messages.
        description: text of its `--help`.
        tools: function by the name of the tool.
        arguments: those of the command line; None for `sys.argv`.
    """
    parser = Parser(
        prog=program,
        usage=f"{program} {{{','.join(tools)}}} ...",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    tool, flags = split_command(parser, tools, sys.argv[1:] if arguments is None else arguments)
    return run(tools[tool], flags)


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keeps the line breaks of the description, and shows the default of each flag that has one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        has_none = action.default in (None, False, [], argparse.SUPPRESS) or "default" in (action.help or "")
        if has_none or isinstance(action, argparse._StoreFalseAction):
            return action.help or ""
        return f"{action.help or ''} (default: %(default)s)".strip()


def parser(tool: str, description: str) -> argparse.ArgumentParser:
    """Returns the parser of one tool, with the flags that every tool has."""
    flags = Parser(
        prog=f"{PROGRAM} {tool}",
        description=description,
        formatter_class=_Help,
        allow_abbrev=False,
    )
    flags.add_argument(
        "--input", type=location, required=True,
        help="where the original files are: a path, or an address such as https://... or s3://...",
    )  # fmt: skip
    flags.add_argument("--output", type=Path, required=True, help="folder to create")
    flags.add_argument("--overwrite", action="store_true", help="replace the output folder if it exists")
    flags.add_argument("--rows-per-group", type=positive, default=1024, help="rows per parquet row group")
    return flags


def add_evaluation_history(flags: argparse.ArgumentParser) -> None:
    """Adds the flag --evaluation-history of the tools that split by time."""
    flags.add_argument(
        "--evaluation-history",
        choices=("frozen", "live"),
        default="frozen",
        help="histories of validation and test: up to the beginning of the split (default), or up to each "
        "request",
    )


def add_core(flags: argparse.ArgumentParser, note: str = "") -> None:
    """Adds the flags that leave out users and items with few events."""
    for side in ("user", "item"):
        flags.add_argument(
            f"--min-{side}-events",
            type=positive,
            default=1,
            help=f"leave out {side}s with fewer events{note}",
        )


def add_part_rows(flags: argparse.ArgumentParser) -> None:
    """Adds the flag that bounds the memory of the tools that read logs of any size."""
    flags.add_argument(
        "--part-rows", type=positive, default=2_000_000, help="number of events in memory at a time"
    )


def print_next(output: Path) -> None:
    """Prints the last line of a tool: the command that trains on the data it made."""
    print(f"next: {train_command(output)}")


@contextmanager
def local_inputs(
    options: argparse.Namespace, *flags: str, patterns: Sequence[str] = ("*",), maxdepth: int | None = None
) -> Iterator[None]:
    """Replaces inputs that are addresses by local copies during the block. The copies are made beside the
    output folder and removed at the end. Errors within the block name the addresses.

    Args:
        options: the parsed flags of a tool; changed in place.
        flags: names of the flags that give inputs.
        patterns: names of the files that the tool reads from a folder.
        maxdepth: levels of a folder that the tool searches; None: all.

    Raises:
        ConfigError: the output folder cannot be made; this is found before anything is downloaded.
    """
    addresses = {flag: getattr(options, flag) for flag in flags if isinstance(getattr(options, flag), str)}
    if not addresses:
        yield
        return
    require_free(options.output, overwrite=options.overwrite)
    parent = _make_parent(options.output)
    copies: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix=f".{options.output.name}.download-", dir=parent) as folder:
        try:
            for flag, address in addresses.items():
                place = Path(folder) / flag
                place.mkdir()
                with files.naming_full_disk(parent):
                    copy = download(address, place, patterns, maxdepth)
                copies[str(copy)] = address.rstrip("/")
                setattr(options, flag, copy)
            yield
        except RecsysError as error:
            text = str(error)
            for copy, address in copies.items():
                text = text.replace(copy, address)
            error.args = (text,)
            raise


def require_free(target: Path, *, overwrite: bool) -> bool:
    """Returns whether the output folder is not empty, which `overwrite` allows.

    Raises:
        ConfigError: the folder is not empty and `overwrite` is off, or it is a file.
    """
    occupied = target.exists() and (not target.is_dir() or any(target.iterdir()))
    if occupied and not overwrite:
        raise ConfigError(f"{target} exists; give another --output, or --overwrite to replace it")
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{target} is a file; --output must name a folder")
    return occupied


def _make_parent(target: Path) -> Path:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {target}: cannot be written: {error.strerror or error}") from error
    return target.parent


@contextmanager
def output_folder(target: Path, *, source: Path, overwrite: bool) -> Iterator[Path]:
    """Yields a folder to write into; it becomes `target` if the block succeeds, and is removed if it fails.

    Args:
        target: the folder to make.
        source: the input, which must not be in `target`.
        overwrite: replace the contents of `target`.

    Raises:
        ConfigError: `target` is not empty and `overwrite` is off, or it contains the source.
    """
    occupied = require_free(target, overwrite=overwrite)
    if occupied and source.resolve().is_relative_to(target.resolve()):
        raise ConfigError(
            f"--output {target} holds the --input, which --overwrite would remove; give another"
        )
    _make_parent(target)
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    retired = target.parent / f".{target.name}.old-{os.getpid()}"
    partial.mkdir()
    try:
        yield partial
        if target.exists():
            target.rename(retired)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(retired, ignore_errors=True)
