"""Runs for tests, small enough to finish in a second: in this process, or in one that can be killed."""

import contextlib
import importlib
import io
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from recsys import cli
from recsys import evaluate as evaluate_command
from recsys import train as train_command
from recsys.training.hooks.metrics_file import NAME, read_metrics
from recsys.training.restricted_unpickler import SafeReader, read_metadata
from tests.tools.forks import Fork, start_command

CONFIG = "tests/integration/tiny.config"
ROOT = Path(__file__).resolve().parents[2]


def flags(folder: Path, *overrides: str) -> list[str]:
    """The command line of a run."""
    chosen = ["--config", CONFIG, "--run-dir", str(folder)]
    for override in overrides:
        chosen += ["--set", override]
    return chosen


def train(folder: Path, *overrides: str) -> int:
    """Runs the command in this process and returns its exit code."""
    return cli.main("train", train_command.run, flags(folder, *overrides))


def evaluate(*arguments: str) -> int:
    """Runs the command in this process and returns its exit code."""
    return cli.main("evaluate", evaluate_command.run, list(arguments), add_flags=evaluate_command.add_flags)


def command(name: str, *arguments: object, cwd: Path | None = None, code: int = 0, **variables: str) -> str:
    """Runs `recsys.<name>` in this process, checks its exit code, and returns what it printed.

    A process of its own would spend some five seconds on imports. Use `command_in_new_process` where a test
    is about that process.
    """
    module = importlib.import_module(f"recsys.{name}")
    printed = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(printed))
        stack.enter_context(contextlib.redirect_stderr(printed))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(sys, "argv", [f"recsys.{name}", *map(str, arguments)])
        patch.chdir(cwd or Path.cwd())
        for variable, value in variables.items():
            patch.setenv(variable, value)
        try:
            exit_code = module.main()
        except SystemExit as end:
            exit_code = end.code
    assert exit_code == code, f"exit code {exit_code}, not {code}:\n{printed.getvalue()}"
    return printed.getvalue()


def command_in_new_process(name: str, *arguments: object, cwd: Path, code: int = 0) -> str:
    """Runs `python -m recsys.<name>`, checks its exit code, and returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", f"recsys.{name}", *map(str, arguments)],
        cwd=cwd,
        env=one_thread() | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, f"exit code {done.returncode}, not {code}:\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def start(folder: Path, *overrides: str, new_group: bool = False) -> Fork:
    """Starts the command in a process for itself, on request in a new process group, and returns at once."""
    return start_command("train", *flags(folder, *overrides), new_group=new_group)


def torchrun(ranks: int, *command: str) -> subprocess.Popen[str]:
    """Runs a Python command line on several ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.Popen(
        [sys.executable, *launcher, *command],
        env=one_thread(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: Fork | subprocess.Popen[str], code: int = 0) -> str:
    """Waits for the process, checks its exit code, and returns its output."""
    output, _ = process.communicate(timeout=120)
    assert process.returncode == code, f"exit code {process.returncode}, not {code}:\n{output}"
    return output


def wait_for(condition: Callable[[], bool], process: Fork | subprocess.Popen[str]) -> None:
    """Returns as soon as a condition about a running process holds."""
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, f"the process ended early:\n{process.communicate()[0]}"
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.0005)


def records(folder: Path, kind: str = "train") -> dict[int, dict[str, Any]]:
    """Records of `metrics.jsonl` by step, without what depends on the clock and the machine."""
    path = folder / NAME
    actual = [r for r in read_metrics(path) if r["kind"] == kind] if path.exists() else []
    timed = {"samples_per_s", "tokens_per_s", "tflop_per_s", "mfu", "data_wait", "memory_bytes", "seconds"}
    return {r["step"]: {key: value for key, value in r.items() if key not in timed} for r in actual}


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """Everything in a saved state, whole."""
    entries = read_metadata(path).state_dict_metadata
    actual = {name: torch.empty(x.size, dtype=x.properties.dtype) for name, x in entries.items()}
    dcp.load(actual, storage_reader=SafeReader(path), no_dist=True)
    return actual


def one_thread() -> dict[str, str]:
    """This process's environment, with one computing thread: sums depend on how they are divided."""
    return os.environ | {"OMP_NUM_THREADS": "1"}
