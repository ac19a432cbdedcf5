"""In the process of Triton's interpreter: uninitialised memory holds NaN, and blocks have a file's sizes."""

import importlib

import pytest
import torch

from tests.tools.interpreter import INTERPRETED, mend_interpreter


@pytest.fixture(autouse=True)
def interpreter(request, monkeypatch):
    """Mends the interpreter, poisons memory and makes blocks small; does nothing elsewhere.

    `SMALL` of a test's file has values of constants by module, below `recsys.ops`, and name; a function
    returns the value for the one that is there.
    """
    if not INTERPRETED:
        yield
        return
    mend_interpreter(monkeypatch)
    for name, sizes in getattr(request.module, "SMALL", {}).items():
        module = importlib.import_module(f"recsys.ops.{name}")
        for constant, value in sizes.items():
            chosen = value(getattr(module, constant)) if callable(value) else value
            monkeypatch.setattr(module, constant, chosen)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
