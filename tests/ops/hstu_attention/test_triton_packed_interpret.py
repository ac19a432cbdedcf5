"""The kernels with the bias by inline assembly on a CPU: Triton's interpreter around `tests.tools.ptx`."""

import pytest
import torch

from recsys.ops import AttentionMask, RelativeBias, hstu_attention
from tests.ops.cases import layout_of, relative_bias, samples
from tests.tools import ptx
from tests.tools.interpreter import INTERPRETED, interpreted, mend_interpreter, run_interpreted, starts_it

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

    from recsys.ops.hstu_attention.bias import packed_launch

    mend_interpreter(monkeypatch)
    monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", execute)
    monkeypatch.setattr(packed_launch, "_is_hopper", lambda device: True)


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


@interpreted
@pytest.mark.parametrize("deterministic", [False, True])
def test_parts_of_the_items_add_up(deterministic, monkeypatch):
    """Each tile with records of its own, where the records of all would take too much memory."""
    from recsys.ops.hstu_attention.bias import launch as bias_launch

    made, original = [], bias_launch._records
    monkeypatch.setattr(
        bias_launch, "_records", lambda *given: made.append(len(given[2])) or original(*given)
    )
    layout = layout_of(samples(1, [(100, 3), (5, 0), (64, 9)]))
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(layout.total_len, HEADS, DIM, generator=generator).half() for _ in range(3)]
    host, times = relative_bias(layout.total_len, rows=HEADS), times_of("hours", layout.total_len)
    found = []
    for small in (bias_launch.SMALL_RECORDS, 40):
        monkeypatch.setattr(bias_launch, "MOST_RECORD_BYTES", 0)
        monkeypatch.setattr(bias_launch, "SMALL_RECORDS", small)
        given = [tensor.requires_grad_() for tensor in leaves]
        tables = [t.detach().float().requires_grad_() for t in (host.position_table, host.time_table)]
        again = layout_of(samples(1, [(100, 3), (5, 0), (64, 9)]))  # nothing kept from before
        found.append(results(given, tables, times, again, AttentionMask(), "triton", deterministic))
    assert made == [5, 5] + 3 * [2, 2, 1]  # of rows and of keys; forward, keys, rows
    *others, position_table, time_table = zip(*found, strict=True)
    assert all(torch.equal(ours, other) for ours, other in others)
    for ours, other in (position_table, time_table):
        torch.testing.assert_close(
            ours, other, rtol=1e-5 * (not deterministic), atol=1e-5 * (not deterministic)
        )


def test_records_take_a_bounded_number_of_bytes_a_token(monkeypatch):
    """For samples of any length, all items in their order; in one part up to 8,192 tokens."""
    pytest.importorskip("triton")
    from recsys.ops.hstu_attention.bias import launch as bias_launch
    from recsys.ops.hstu_attention.bias.launch import NUM_ARGUMENTS, RECORDS, packed_parts

    class Nothing:
        def __getitem__(self, grid):
            return lambda *arguments, **constants: None

    monkeypatch.setattr(bias_launch, "records_kernel", Nothing())
    bytes_a_token = {}
    for length, number in ((512, 512), (2048, 128), (8192, 32), (65536, 8), (2**19, 1)):
        layout = layout_of(samples(0, [(length, 0)] * number))
        items = torch.arange(layout.total_len // 64)[:, None].expand(-1, 12)
        dummy, times = torch.zeros(1), (torch.zeros(1), torch.zeros(1))
        arguments = [dummy] * (NUM_ARGUMENTS - 1) + [40]
        taken, seen = [], []
        for part, given in packed_parts(
            arguments, times, layout, items, (64, 64), (AttentionMask(), True, None)
        ):
            taken.append(given[RECORDS].nbytes)
            seen.append(part)
            assert given[:RECORDS] == arguments[:RECORDS] and given[RECORDS + 1 :] == arguments[RECORDS + 1 :]
        assert torch.equal(torch.cat(seen), items)
        assert len(taken) == max(1, length // 8192)
        bytes_a_token[length] = max(taken) / layout.total_len
    # 16 bytes for each of length / 64 blocks of a tile of 64 tokens, as long as that is at most 32.
    assert bytes_a_token[2048] == pytest.approx(8, abs=1e-3)
    assert max(bytes_a_token.values()) == pytest.approx(32, abs=0.3)


@starts_it
def test_the_kernels_in_the_interpreter():
    run_interpreted(__file__)
