"""In the interpreter the assembly of packed scores runs, and the CPU is taken for a Hopper GPU."""

import pytest

from tests.tools import ptx
from tests.tools.interpreter import INTERPRETED


class Executed:
    """The result of the builder of inline assembly."""

    def __init__(self, handle):
        self.handle = handle

    def get_result(self, index):
        assert index == 0
        return self.handle


def execute(builder, text, constraints, values, types, is_pure, pack):
    from triton.language import float32
    from triton.runtime.interpreter import TensorHandle

    out = ptx.run_inline(text, [value.data for value in values], pack)
    return Executed(TensorHandle(out, float32))


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    """Lets the interpreter run the assembly; does nothing elsewhere."""
    if not INTERPRETED:
        return
    from triton.runtime.interpreter import InterpreterBuilder

    from recsys.ops.hstu_attention.bias import packed

    monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", execute)
    monkeypatch.setattr(packed, "_is_hopper", lambda device: True)
