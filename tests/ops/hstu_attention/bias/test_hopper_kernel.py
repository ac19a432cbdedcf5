"""The Gluon kernel with the bias: its logic on a CPU, by `tools.gluon_emulator` and `tools.ptx` in
Triton's interpreter, and its code, compiled for sm_90a."""

import re

import pytest
import torch

from recsys.ops import AttentionMask, RelativeBias
from recsys.ops.hstu_attention import Problem
from tests.ops.attention import times_of
from tests.ops.cases import layout_of, relative_bias, samples
from tests.ops.hstu_attention.test_triton_packed import HEADS, on_hopper  # noqa: F401
from tests.tools.assembled import assembled, compile_to_ptx
from tests.tools.interpreter import INTERPRETED, interpreted, run_interpreted, starts_it

triton = pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")
if not triton.__version__.startswith("3.6."):
    pytest.skip("the kernel is written in the Gluon of Triton 3.6", allow_module_level=True)

DIM = 64
SCALE_LEN = 64.0


@pytest.fixture
def emulated(monkeypatch):
    from recsys.ops.hstu_attention.bias import hopper_launch as biased_launch
    from recsys.ops.hstu_attention.hopper import launch as hopper_launch
    from recsys.ops.hstu_attention.triton import launch as triton_launch
    from tests.tools.gluon_emulator import Emulated

    monkeypatch.setattr(triton_launch, "can_describe", lambda *_: True)
    monkeypatch.setattr(hopper_launch, "CACHED_BYTES", 100 * HEADS * DIM * 8)  # several sections
    monkeypatch.setattr(triton_launch, "missing_for_hopper", lambda: "")
    monkeypatch.setattr(biased_launch, "biased_kernel", Emulated(biased_launch.biased_kernel))


def gradients(kind, shapes, contextual, rows, mask):
    """Those of the kernel, and what it was given: layout, cotangent, q, k and v, bias."""
    from recsys.ops.hstu_attention.triton import launch as triton_launch

    layout = layout_of(samples(contextual, shapes))
    generator = torch.Generator().manual_seed(0)
    shape = layout.total_len, HEADS, DIM
    cotangent, *leaves = (torch.randn(shape, generator=generator).half() for _ in range(4))
    host, times = relative_bias(layout.total_len, rows=rows), times_of(kind, layout.total_len)
    tables = [table.detach() for table in (host.position_table, host.time_table)]
    bias = RelativeBias(*tables, times, torch.cat([times[1:], times[-1:] + 60]))
    problem = Problem(layout, mask, DIM**-0.5, SCALE_LEN, bias)
    got = triton_launch.backward(cotangent, *leaves, problem, tables=True)
    return got, layout, cotangent, leaves, bias


@interpreted
@pytest.mark.parametrize(
    ("kind", "shapes", "contextual", "rows", "mask"),
    [
        ("hours", [(150, 9)], 0, HEADS, AttentionMask()),
        ("years", [(70, 20), (5, 0), (0, 30), (64, 0)], 1, None, AttentionMask(130, 70, True, 5)),
        ("anywhere", [(200, 3)], 3, None, AttentionMask(window=40)),
        ("missing", [(63, 1), (1, 1), (300, 0), (0, 0)], 0, HEADS, AttentionMask(None, 0, False, 3, False)),
        ("minutes", [(260, 0)], 0, HEADS, AttentionMask(window=20, prefix=2)),
    ],
)
def test_gradients_are_as_near_as_the_reference(kind, shapes, contextual, rows, mask, emulated):
    """In float16, which the interpreter has: at most twice as far from float64; sums of 11 bits."""
    from recsys.ops.hstu_attention import reference

    got, layout, cotangent, leaves, bias = gradients(kind, shapes, contextual, rows, mask)
    found = []
    for dtype, wide in ((torch.float16, torch.float32), (torch.float64, torch.float64)):
        given = [tensor.to(dtype).requires_grad_() for tensor in leaves]
        given += [table.to(wide).requires_grad_() for table in (bias.position_table, bias.time_table)]
        own_bias = RelativeBias(*given[3:], bias.timestamps, bias.next_timestamps)
        out = reference.run(*given[:3], Problem(layout, mask, DIM**-0.5, SCALE_LEN, own_bias))
        found.append(torch.autograd.grad(out, given, cotangent.to(out)))
    for ours, other, exact in zip(got, *found, strict=True):
        error, allowed = ((tensor.double() - exact).norm() for tensor in (ours, other))
        assert error <= 2 * allowed + 1e-3 * exact.norm()


@interpreted
def test_parts_of_the_items_add_up(emulated, monkeypatch):
    from recsys.ops.hstu_attention.bias import launch as bias_launch

    shapes = [(70, 20), (64, 0), (130, 5)]
    found, starts = [], []
    monkeypatch.setattr(bias_launch, "MOST_RECORD_BYTES", 0)
    for small in (bias_launch.SMALL_RECORDS, 100):
        monkeypatch.setattr(bias_launch, "SMALL_RECORDS", small)
        found.append(gradients("hours", shapes, 1, HEADS, AttentionMask())[0])
        starts.append(bias_launch.num_parts(6, layout_of(samples(1, shapes)), DIM))
    assert starts == [1, 3]
    for ours, other in zip(*found, strict=True):
        torch.testing.assert_close(ours, other, rtol=2**-10, atol=1e-6)  # in float16


@starts_it
def test_the_kernel_in_the_emulator():
    run_interpreted(__file__)


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled in the interpreter")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_programs_share_a_processor_and_no_product_waits(every, dtype, tmp_path):
    """Registers without spills, shared memory with that of the assembly, products under way at a time."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from recsys.ops.hstu_attention.bias.hopper_launch import BLOCKS, biased_kernel
    from tests.ops.hstu_attention import test_triton_compile as compiling

    constants = {"WINDOWED": every, "TARGET_WINDOW": False, "GROUPED": every, "CONTEXTUAL_READS": True}
    constants |= compiling.assemblies_of("packed_sums", BLOCKS)
    types = compiling.POINTERS | {"time_table": "i32", "near": "u8", "records": "i32"}
    types |= {"grad_k": dtype, "grad_v": dtype}
    signature = {}
    for name in biased_kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_desc"):
            kind, bits = ("fp32", 32) if name == "rows_desc" else (dtype, 16)
            layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=4)
            signature[name] = f"tensordesc<{kind}[1,1,64,{DIM}],{layout!r}>"
        elif name in types:
            signature[name] = f"*{types[name]}"
        else:
            signature[name] = "fp32" if name in ("alpha", "inverse_scale") else "i32"
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(biased_kernel.arg_names)
        if name.startswith("stride_") or signature[name].startswith("*")
    }
    source = GluonASTSource(biased_kernel, signature=signature, constexprs=constants, attrs=aligned)
    made = compile_to_ptx(source, {"num_warps": 4}, tmp_path)
    program = assembled(made, tmp_path)
    compiling.check_spills(program, DIM, 2)
    assert "serializ" not in program.report, program.report
    (declared,) = re.findall(r"(\d+) bytes smem", program.report)
    assert 2 * (made.metadata.shared + int(declared) + 1024) <= 228 * 1024
    packed = re.findall(r"packed_element = 32 .*-> tensor<64x64x\w+, (#\w+)>", made.asm["ttgir"])
    assert len(packed) == 2
    (layout,) = {re.findall(rf"^{one} = (.*)$", made.asm["ttgir"], re.MULTILINE)[0] for one in packed}
    assert "#ttg.nvidia_mma<{versionMajor = 3" in layout, layout
    assert "warpsPerCTA = [4, 1], instrShape = [16, 64, 16]" in layout, layout
