"""Implements the command line that all commands share: flags, logging, exit codes of errors.

An entry point is a function of a `Call` and one line, `return cli.main("train", run, arguments)`. Exit codes:
0 success, 1 run-time error, 2 usage or config, 3 data, 4 non-finite loss, 5 installation, 6 a rank is stopped
or gone, 130 and 143 after a signal, 141 if the output is no longer read.
"""

import argparse
import contextlib
import errno
import faulthandler
import functools
import gc
import logging
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import recsys.config as config
from recsys import environment, files
from recsys import protos as pb
from recsys.errors import ConfigError, InstallationError, RecsysError
from recsys.flags import Parser, PrintVersions, closed_pipe
from recsys.logs import is_first_process, log_to_file, log_to_stderr

logger = logging.getLogger(__name__)

LEVELS = ("debug", "info", "warning", "error")
LOG_VARIABLE = "RECSYS_LOG"
"""Environment variable that sets the level of the log if `--log-level` does not."""

VARIABLES = (LOG_VARIABLE, "RECSYS_BACKEND")
"""Environment variables that the package reads; a run logs those that are set."""

MOST_FINDINGS = 30
"""Most findings that are printed; more do not help someone who gave the wrong file."""


@dataclass(frozen=True)
class Call:
    """The request of a command line.

    Attributes:
        ready: resolved config with origins; None if the command needs no config and got none.
        run_dir: folder of the run; not created yet.
        dry_run: do one step and save nothing.
        flags: all flags, including the command's own flags.
    """

    ready: config.Ready | None
    run_dir: Path
    dry_run: bool
    flags: argparse.Namespace

    @property
    def pipeline(self) -> pb.Pipeline:
        """The resolved config of the call.

        Raises:
            ConfigError: the call has no config.
        """
        if self.ready is None:
            raise ConfigError("no config: give --config FILE, or --run-dir with the folder of a run")
        return self.ready.pipeline


def main(
    command: str,
    run: Callable[[Call], None],
    argv: Sequence[str] | None = None,
    *,
    add_flags: Callable[[argparse.ArgumentParser], None] | None = None,
    needs_config: bool = True,
    config_file: Callable[[argparse.Namespace], Path | None] | None = None,
    takes_config: bool = True,
) -> int:
    """Runs a command and returns its exit code; `--help`, `--version` and wrong flags raise SystemExit.

    Args:
        command: module name below `recsys`.
        run: does the work; the first line of its docstring describes the command in its help.
        argv: the flags; by default the arguments of the process.
        add_flags: adds the command's own flags.
        needs_config: whether a call without a config is an error.
        config_file: returns the path of a package's resolved config, whose files are not looked up; None if
            the flags name no package.
        takes_config: False if the command never reads the file of `--config`.
    """
    parser = _parser(command, run, needs_config, packaged_config=not takes_config)
    if add_flags is not None:
        add_flags(parser)
    flags = parser.parse_args(argv)
    if flags.log_level is None:
        flags.log_level = _level_of_variable(parser)
    _share_cores()
    environment.quiet_torch()
    with log_to_stderr(flags.log_level):
        if is_first_process() and environment.protos_differ():
            logger.warning("recsys/protos does not match protos/; type: %s", environment.COMPILE_PROTOS)
        return _guard(_recorded(lambda: _prepare_and_run(command, run, flags, needs_config, config_file)))


def _share_cores() -> None:
    """Makes OpenMP's threads sleep instead of spin while they wait for each other.

    If reader processes or other programs need the same cores, spinning threads block the threads that they
    wait for: 60 small steps took 91 s on two busy cores, and 4 s with sleeping threads
    (experiments/2026-11-22-small-figures). OpenMP reads the setting when torch is imported, which happens
    later. A setting of the user is not changed.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def add_checkpoint(flags: argparse._ActionsContainer) -> None:
    """Adds the flag of commands that load a trained state from a run folder."""
    flags.add_argument(
        "--checkpoint",
        default="best",
        metavar="WHICH",
        help="best (default), newest, or the number of a step that was kept",
    )


def _recorded(action: Callable[[], int | None]) -> Callable[[], int | None]:
    """Wraps an action so that torchrun reports this process's exception as the root cause.

    Without this wrapper, torchrun only reports an exit code and a missing traceback.
    """
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return action
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # stderr may have been replaced
        faulthandler.enable(all_threads=True)

    def run() -> int | None:
        try:
            return action()
        except Exception as error:
            # Only an error is worth this import, which takes seconds.
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(error)
            raise

    return run


def _guard(action: Callable[[], int | None]) -> int:
    """Runs an action and returns its exit code; errors for users are shown without a traceback."""
    try:
        code = action() or 0
        sys.stdout.flush()
        return code
    except ConfigError as error:
        if not is_first_process():
            return error.exit_code
        more = len(error.findings) - MOST_FINDINGS
        print("\n".join(error.findings[:MOST_FINDINGS]), file=sys.stderr)
        if more > 0:
            print(f"... and {more} more", file=sys.stderr)
        return error.exit_code
    except RecsysError as error:
        logger.error("%s", error)
        logger.debug("it happened here", exc_info=True)
        return error.exit_code
    except ImportError as error:
        # Commands import libraries when they run, so a broken library fails here, whatever the config is.
        logger.error("%s: %s", error, environment.REPAIR)
        logger.debug("it happened here", exc_info=True)
        return InstallationError.exit_code
    except BrokenPipeError:
        return closed_pipe()
    except OSError as error:
        logger.error("%s", _explain(error))
        logger.debug("it happened here", exc_info=True)
        return RecsysError.exit_code
    except KeyboardInterrupt:
        logger.error("interrupted")
        return 130


_REMEDIES = {
    errno.EACCES: "change its permissions, or run the command as its owner",
    errno.EPERM: "change its permissions, or run the command as its owner",
    errno.EROFS: "name a folder that can be written",
    errno.EISDIR: "move the folder out of the way",
    errno.ENOTDIR: "move the file that stands in place of a folder out of the way",
    errno.EEXIST: "move what is at that path out of the way",
    errno.ELOOP: "repair the symbolic link",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}
"""Remedies for errors of the operating system, by error number."""


def _explain(error: OSError) -> str:
    """Returns the system's message, which names the file, followed by a remedy."""
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{error}; {remedy}" if remedy else str(error)


def _prepare_and_run(
    command: str,
    run: Callable[[Call], None],
    flags: argparse.Namespace,
    needs_config: bool,
    config_file: Callable[[argparse.Namespace], Path | None] | None,
) -> int:
    path = None
    packaged = config_file(flags) if config_file is not None else None
    if packaged is None:
        path = _config_path(flags, needs_config)
        ready = config.prepare(path, flags.set, imports=flags.imports) if path is not None else None
        folder = flags.run_dir or (Path("runs") / path.stem if path is not None else None)
    else:
        # A package may come from an untrusted source, so its config must not import Python modules.
        ready = config.prepare(
            packaged, flags.set, read_files=False, imports=flags.imports, follow_imports=False
        )
        folder = flags.run_dir
    if ready is not None:
        # For the config of a run folder, warnings were already shown when the run began.
        for warning in ready.warnings if flags.config is not None and is_first_process() else ():
            logger.warning("%s", warning)
        if command == "train" and path is not None:
            config.check_libraries(ready.pipeline, config.read(path, flags.set).locations)
        if flags.validate and path is not None:
            _compare_with_files(ready.pipeline, config.read(path, flags.set).locations)
            if command == "train" and ready.pipeline.train.HasField("init_from"):
                environment.import_torchrec_quietly()
                from recsys.training.warm_start import find_state

                print(f"train.init_from: {find_state(ready.pipeline.train.init_from)}")
        if flags.validate or flags.print_config:
            print("ok" if flags.validate else config.to_text(ready.pipeline, ready.origins).rstrip())
            return 0
    call = Call(ready, Path(folder or "."), flags.dry_run, flags)
    # Only training creates a run folder. A misspelt path must not create a folder.
    to_file = command == "train" or os.access(call.run_dir, os.W_OK)
    if flags.dry_run or folder is None or not to_file:
        return _guard(_recorded(lambda: _run(run, call)))
    is_new = not call.run_dir.exists()
    with log_to_file(call.run_dir):
        code = _guard(_recorded(lambda: _run(run, call)))
    if code and is_new:
        _remove_unused(call.run_dir)
    return code


def _compare_with_files(pipeline: pb.Pipeline, locations: dict[str, str]) -> None:
    """Checks the columns of the files that a config names.

    Raises:
        ConfigError: lists every missing or wrong column.
    """
    from recsys.data.validation import compare_with_files

    compared = compare_with_files(pipeline, locations)
    for warning in compared.warnings if is_first_process() else ():
        logger.warning("%s", warning)
    if compared.faults:
        raise ConfigError(compared.faults)


def _run(run: Callable[[Call], None], call: Call) -> None:
    for name in VARIABLES:
        if os.environ.get(name):
            logger.info("%s=%s is set", name, os.environ[name])
    _leave_out_imports()
    run(call)


@functools.cache
def _leave_out_imports() -> None:
    """Lets collections leave out what libraries have made: 400,000 objects that stay, for which a full
    collection would take half a second."""
    gc.freeze()


def _config_path(flags: argparse.Namespace, needs_config: bool) -> Path | None:
    """Returns the file of `--config`, else the config in the run folder."""
    if flags.config is not None:
        return Path(flags.config)
    if flags.run_dir is not None and (Path(flags.run_dir) / config.FILE_NAME).exists():
        return Path(flags.run_dir) / config.FILE_NAME
    if flags.run_dir is not None and needs_config:
        raise ConfigError(
            f"--run-dir {flags.run_dir}: holds no run (no {config.FILE_NAME} in it), and --config is not "
            "given"
        )
    if needs_config or flags.validate or flags.print_config or flags.set:
        raise ConfigError("--config: not given; name a .config file, or the folder of a run in --run-dir")
    return None


def _parser(
    command: str, run: Callable[[Call], None], needs_config: bool, *, packaged_config: bool
) -> argparse.ArgumentParser:
    description = (run.__doc__ or "").strip().split("\n")[0]
    parser = Parser(f"python -m recsys.{command}", description=description, allow_abbrev=False)
    shared = parser.add_argument_group("shared flags")
    wanted = "required, unless --run-dir is the folder of a run" if needs_config else "optional"
    # Commands that find their config themselves accept the flag too, to explain this if it is given.
    about = argparse.SUPPRESS if packaged_config else f"the .config file; {wanted}"
    shared.add_argument("--config", metavar="FILE", help=about)
    shared.add_argument(
        "--set",
        metavar="PATH=VALUE",
        action="append",
        default=[],
        help="override a field, for example train.num_steps=100, or a whole list, data.key_columns=['a', "
        "'b']; may be repeated",
    )
    shared.add_argument(
        "--import",
        dest="imports",
        metavar="MODULE",
        action="append",
        default=[],
        help="import a Python module that adds components, see docs/extending.md; a run remembers "
        "it; may be repeated",
    )
    default = "" if packaged_config else " (default: runs/<name of the config>)"
    shared.add_argument("--run-dir", metavar="DIR", help=f"folder of the run{default}")
    shared.add_argument(
        "--validate", action="store_true", help="check the config, print ok or all findings, stop"
    )
    shared.add_argument(
        "--print-config",
        action="store_true",
        help="print every setting with the origin of those that the file does not give, stop",
    )
    shared.add_argument("--dry-run", action="store_true", help="one batch, one step, nothing saved")
    shared.add_argument(
        "--log-level", choices=LEVELS, help=f"default: the variable {LOG_VARIABLE}, else info"
    )
    shared.add_argument("--version", action=PrintVersions, help="print versions of the libraries, stop")
    return parser


def _level_of_variable(parser: argparse.ArgumentParser) -> str:
    given = os.environ.get(LOG_VARIABLE) or "info"
    if given.lower() not in LEVELS:
        parser.error(f"variable {LOG_VARIABLE}: invalid level: {given!r} (choose from {', '.join(LEVELS)})")
    return given.lower()


def _remove_unused(folder: Path) -> None:
    """Removes a run folder in which no run began, because of a broken input file for example.

    It holds only the log, which was also shown, and perhaps a lock.
    """
    if is_first_process() and {path.name for path in folder.iterdir()} <= {"log.txt", ".lock"}:
        with files.locked(folder / ".lock") as is_alone:
            if is_alone:
                shutil.rmtree(folder)
