"""Runs tests of Triton kernels on a CPU.

Triton decides when it is imported whether it interprets, so such tests run in a separate process. A file
marks them `interpreted`, which `tests/conftest.py` skips in the process that everything else runs in; another
test of the file starts the interpreter's process with `run_interpreted`.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ROOT = Path(__file__).resolve().parents[2]

interpreted = pytest.mark.interpreted


def starts_it(test):
    """Marks the test that calls `run_interpreted`; it skips where Triton is not installed."""
    has_triton = importlib.util.find_spec("triton") is not None
    test = pytest.mark.skipif(not has_triton, reason="Triton is not installed (pip install triton==3.6.0)")(
        test
    )
    return pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")(test)


def run_interpreted(file: str) -> None:
    """Passes if the tests of `file` that are marked `interpreted` do, in the interpreter."""
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "interpreted"]
    command = [sys.executable, "-m", "pytest", *options, file]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr


def mend_interpreter(monkeypatch) -> None:
    """Lets `range` take bounds that a kernel computed: NumPy >= 2.4 refuses int() of such an array."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


def between_poison(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor as a view, between rows of NaN or, for integers, absurd values."""
    poison = float("nan")
    if not tensor.is_floating_point():
        poison = 2 ** (40 if tensor.dtype == torch.int64 else 30)
    padded = torch.full((tensor.shape[0] + 70, *tensor.shape[1:]), poison, dtype=tensor.dtype)
    padded[35:-35] = tensor
    return padded[35:-35]


class WithNumbersOnly:
    """Stands in for `wrap_triton`: skips launches on fake tensors, which the interpreter cannot run."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            if not any(isinstance(argument, FakeTensor) for argument in arguments):
                self.kernel[grid](*arguments, **constants)

        return launch
