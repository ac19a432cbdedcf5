"""In the process of Triton's interpreter: memory that PyTorch hands out uninitialised holds NaN."""

import pytest
import torch

from tests.tools.interpreter import INTERPRETED, mend_interpreter


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """Mends the interpreter and poisons memory; does nothing elsewhere."""
    if not INTERPRETED:
        yield
        return
    mend_interpreter(monkeypatch)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
