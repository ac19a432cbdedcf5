"""The interpreter refuses what would be an illegal access on a GPU."""

import pytest
import torch

from tests.tools.interpreter import INTERPRETED, interpreted, mend_interpreter, run_interpreted, starts_it

if INTERPRETED:
    import triton
    import triton.language as tl

    @triton.jit
    def copy_kernel(source, target, num_read, num_written, atomic: tl.constexpr, SIZE: tl.constexpr):
        place = tl.arange(0, SIZE)
        value = tl.load(source + place, mask=place < num_read, other=0)
        if atomic:
            tl.atomic_add(target + place, value, mask=place < num_written)
        else:
            tl.store(target + place, value, mask=place < num_written)


@interpreted
@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize(("num_read", "num_written"), [(6, 5), (5, 6), (5, 5)])
def test_an_access_behind_a_tensor_is_refused(num_read, num_written, atomic, monkeypatch):
    mend_interpreter(monkeypatch)
    source, target = torch.arange(5.0), torch.zeros(5)
    if num_read == num_written:
        copy_kernel[(1,)](source, target, num_read, num_written, atomic, 8)
        assert torch.equal(source, target)
    else:
        with pytest.raises(triton.runtime.errors.InterpreterError, match="1 accesses outside .* 0 bytes"):
            copy_kernel[(1,)](source, target, num_read, num_written, atomic, 8)


@starts_it
def test_the_interpreter_refuses():
    run_interpreted(__file__)
