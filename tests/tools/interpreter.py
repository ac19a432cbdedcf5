"""Runs tests of Triton kernels on a CPU.

Triton decides when it is imported whether it interprets, so such tests run in a separate process. A file
marks them `interpreted`, which `tests/conftest.py` skips in the process that everything else runs in; another
test of the file starts the interpreter's process with `run_interpreted`.

Importing PyTorch and Triton takes seconds of CPU time, so one process imports them and forks for each file
(`tests.tools.forks`).
"""

import dataclasses
import functools
import importlib.util
import os

import pytest
import torch
from torch._subclasses import FakeTensor

from tests.tools.forks import ROOT, Server
from tests.tools.interpreter_bounds import check_bounds, forbid_padding
from tests.tools.interpreter_speed import speed_up_interpreter

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

interpreted = pytest.mark.interpreted


def starts_it(test):
    """Marks the test that calls `run_interpreted`; it skips where Triton is not installed."""
    has_triton = importlib.util.find_spec("triton") is not None
    test = pytest.mark.skipif(not has_triton, reason="Triton is not installed (pip install triton==3.6.0)")(
        test
    )
    return pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")(test)


IMPORTS = (
    "pytest",
    "hypothesis",
    "torch",
    "triton",
    "triton.language",
    "recsys.ops",
    "recsys.ops.hstu_attention.triton",
    "recsys.ops.hstu_attention.hopper",
)
"""Modules that the tests of a file import, so that a fork need not."""


@functools.cache
def _interpreter() -> Server:
    # Plugins of pytest take a quarter of a second for each file, and no test in the interpreter needs one.
    return Server(IMPORTS, TRITON_INTERPRET="1", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")


def run_interpreted(file: str) -> None:
    """Passes if the tests of `file` that are marked `interpreted` do, in the interpreter."""
    fork = _interpreter().start(
        "pytest:main", ["-q", "-x", "-p", "no:cacheprovider", "-m", "interpreted", file], cwd=ROOT
    )
    output, _ = fork.communicate(timeout=600)
    assert fork.returncode == 0, f"exit code {fork.returncode}\n{output}"


def mend_interpreter(monkeypatch) -> None:
    """Lets `range` take bounds that a kernel computed, makes the interpreter three times as fast, and lets it
    refuse accesses outside of tensors.

    NumPy >= 2.4 refuses int() of the array that holds a computed bound. The interpreter replaces the
    functions of `triton.language` for each call of a device function, though once per launch is enough. It
    also computes each integer operation again in 64 bits, for an assertion that it makes in debug mode only.
    """
    from triton.runtime import interpreter

    patch_tensor, patch_lang = interpreter._patch_lang_tensor, interpreter._patch_lang
    builder = interpreter.interpreter_builder
    patched: set[frozenset[int]] = set()
    by_globals: dict[int, tuple[dict, frozenset[int]]] = {}

    def with_index(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def once_per_launch(function):
        names = function.__globals__
        if id(names) not in by_globals:
            modules = {id(interpreter.tl), id(interpreter.tl.core)}
            by_globals[id(names)] = names, frozenset(modules.intersection(map(id, names.values())))
        _, key = by_globals[id(names)]
        if key in patched:
            return interpreter._LangPatchScope()
        patched.add(key)
        scope = patch_lang(function)
        restore = scope.restore

        def restore_at_the_end():
            restore()
            patched.clear()

        scope.restore = restore_at_the_end
        return scope

    assert not builder.options.debug  # else overflows would be asserted
    options = dataclasses.replace(builder.options, sanitize_overflow=False)
    monkeypatch.setattr(builder, "options", options)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", with_index)
    monkeypatch.setattr(interpreter, "_patch_lang", once_per_launch)
    speed_up_interpreter(monkeypatch)
    check_bounds(monkeypatch)


def between_poison(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor as a view, between rows of NaN or, for integers, absurd values."""
    poison = float("nan")
    if not tensor.is_floating_point():
        poison = 2 ** (40 if tensor.dtype == torch.int64 else 30)
    padded = torch.full((tensor.shape[0] + 70, *tensor.shape[1:]), poison, dtype=tensor.dtype)
    padded[35:-35] = tensor
    return forbid_padding(padded[35:-35])


class WithNumbersOnly:
    """Stands in for `wrap_triton`: skips launches on fake tensors, which the interpreter cannot run."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            if not any(isinstance(argument, FakeTensor) for argument in arguments):
                self.kernel[grid](*arguments, **constants)

        return launch
