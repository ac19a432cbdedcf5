"""The kernels with the bias by inline assembly on a CPU: Triton's interpreter around `tests.ops.ptx`."""

import pytest
import torch

from recsys.ops import AttentionMask, RelativeBias, hstu_attention
from tests.ops import ptx
from tests.ops.cases import layout_of, relative_bias, samples
from tests.ops.interpreter import INTERPRETED, interpreted, mend_interpreter, run_interpreted, starts_it

HEADS = 2
DIM = 64


class Executed:
    """What the builder of inline assembly returns."""

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
    if not INTERPRETED:
        return
    from triton.runtime.interpreter import InterpreterBuilder

    from recsys.ops.hstu_attention import triton_packed_launch

    mend_interpreter(monkeypatch)
    monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", execute)
    monkeypatch.setattr(triton_packed_launch, "_is_hopper", lambda device: True)


def times_of(kind, total_len):
    part = torch.rand(total_len, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    now = 1_763_000_000
    return {
        "hours": lambda: now + (9 * part).exp().to(torch.int64).cumsum(0),
        "years": lambda: now + (18 * part).exp().to(torch.int64).cumsum(0),
        "minutes": lambda: 60 * torch.arange(total_len) - 2**33,
        "anywhere": lambda: (part * 2**40).to(torch.int64) - 2**39,
        "missing": lambda: torch.where(part < 0.1, 0, now + 1000 * torch.arange(total_len)),
        "backward": lambda: 2**34 - (part * 2**26).to(torch.int64).cumsum(0),
    }[kind]()


def results(leaves, tables, times, layout, mask, backend, deterministic):
    out = hstu_attention(
        *leaves,
        layout,
        mask,
        scale_len=64,
        bias=RelativeBias(*tables, times, torch.cat([times[1:], times[-1:] + 60])),
        backend=backend,
        deterministic=deterministic,
    )
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out.detach(), *torch.autograd.grad(out, [*leaves, *tables], cotangent)]


@interpreted
@pytest.mark.parametrize(
    ("kind", "shapes", "contextual", "rows", "mask", "deterministic"),
    [
        ("hours", [(150, 9)], 0, HEADS, AttentionMask(), False),
        ("hours", [(70, 5)], 0, None, AttentionMask(), True),
        ("years", [(70, 20), (5, 0), (0, 30), (64, 0)], 1, None, AttentionMask(130, 70, True, 5), False),
        ("anywhere", [(100, 3)], 3, None, AttentionMask(window=40), False),
        ("missing", [(63, 1), (1, 1), (90, 0)], 0, HEADS, AttentionMask(None, 0, False, 3, False), False),
        ("backward", [(130, 0)], 6, HEADS, AttentionMask(), False),
        ("minutes", [(130, 0)], 0, HEADS, AttentionMask(window=20, prefix=2), False),
    ],
)
def test_output_and_gradients_are_as_near_as_the_reference(
    kind, shapes, contextual, rows, mask, deterministic
):
    """In float16, which the interpreter has: at most twice as far from float64; sums of 11 bits."""
    layout = layout_of(samples(contextual, shapes))
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(layout.total_len, HEADS, DIM, generator=generator).half() for _ in range(3)]
    host, times = relative_bias(layout.total_len, rows=rows), times_of(kind, layout.total_len)
    found = []
    for backend, dtype in (
        ("triton", torch.float16),
        ("reference", torch.float16),
        ("reference", torch.float64),
    ):
        given = [tensor.to(dtype).requires_grad_() for tensor in leaves]
        wide = dtype if dtype == torch.float64 else torch.float32
        tables = [t.detach().to(wide).requires_grad_() for t in (host.position_table, host.time_table)]
        once = deterministic and backend == "triton"
        found.append(results(given, tables, times, layout, mask, backend, once))
    for ours, other, exact in zip(*found, strict=True):
        error, allowed = ((tensor.double() - exact).norm() for tensor in (ours, other))
        assert error <= 2 * allowed + 1e-3 * exact.norm()


@starts_it
def test_the_kernels_in_the_interpreter():
    run_interpreted(__file__)
