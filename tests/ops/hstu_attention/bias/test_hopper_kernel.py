"""The Gluon kernel with the bias: its logic on a CPU, by `tools.gluon_emulator` and `tools.ptx` in
Triton's interpreter, and its code, compiled for sm_90a."""

import re

import pytest
import torch

from recsys.ops import AttentionMask, RelativeBias
from recsys.ops.hstu_attention import Problem
from tests.ops import harness
from tests.ops.attention import BIAS, large
from tests.tools.assembled import assembled, compile_kernel, descriptor_type
from tests.tools.interpreter import INTERPRETED, interpreted

triton = pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")
if not triton.__version__.startswith("3.6."):
    pytest.skip("the kernel is written in the Gluon of Triton 3.6", allow_module_level=True)

DIM = 64


@pytest.fixture
def emulated(monkeypatch):
    from recsys.ops.hstu_attention import triton as triton_launch
    from recsys.ops.hstu_attention.bias import hopper_kernel as biased_launch
    from recsys.ops.hstu_attention.hopper import forward
    from tests.tools.gluon_emulator import Emulated

    monkeypatch.setattr(triton_launch, "can_describe", lambda *_: True)
    monkeypatch.setattr(forward, "CACHED_BYTES", 100 * 2 * DIM * 8)  # several sections
    monkeypatch.setattr(triton_launch, "missing_for_hopper", lambda: "")
    monkeypatch.setattr(biased_launch, "biased_kernel", Emulated(biased_launch.biased_kernel))


def gradients(given):
    """Those of the kernel, for the cotangent of the harness."""
    from recsys.ops.hstu_attention import triton as triton_launch

    options, tensors = given.options, [tensor.detach() for tensor in given.tensors.values()]
    bias = RelativeBias(*tensors[3:], *(options[name] for name in BIAS[2:]))
    problem = Problem(options["layout"], options["mask"], DIM**-0.5, 64.0, bias)
    cotangent = harness.normal(*tensors[2].shape, seed=100, dtype=torch.bfloat16).half()
    return triton_launch.backward(cotangent, *tensors[:3], problem, tables=True)


@interpreted
@pytest.mark.parametrize(
    ("times", "shapes", "contextual", "rows", "mask"),
    [
        ("hours", [(66, 9)], 0, 2, AttentionMask()),
        ("years", [(66, 8), (5, 0), (0, 30)], 1, None, AttentionMask(130, 70, True, 5)),
        ("anywhere", [(100, 3)], 3, 1, AttentionMask(window=40)),
        ("missing", [(63, 1), (1, 1), (66, 0), (0, 0)], 0, 1, AttentionMask(None, 0, False, 3, False)),
        ("minutes", [(130, 0)], 0, 1, AttentionMask(window=20, prefix=2)),
    ],
)
def test_gradients_are_as_near_as_the_reference(times, shapes, contextual, rows, mask, emulated):
    """In float16, which the interpreter has: at most twice as far from float64; sums of 11 bits.

    Two heads have a table each or share one; kinds of times and masks are tried with one head.
    """
    given = large(shapes, contextual, (DIM, DIM), torch.float16, rows, mask, times=times, heads=rows or 2)
    _, *theirs = harness.results(given, harness.REFERENCE)
    _, *exact = harness.results(given.cast(torch.float64), harness.REFERENCE)
    harness.assert_as_near(gradients(given), theirs, exact, floor=1e-3)


@interpreted
def test_parts_of_the_items_add_up(emulated, monkeypatch):
    from recsys.ops.hstu_attention.bias import packed as bias_packed

    grads, starts = [], []
    monkeypatch.setattr(bias_packed, "MOST_RECORD_BYTES", 0)
    for small in (bias_packed.SMALL_RECORDS, 100):
        monkeypatch.setattr(bias_packed, "SMALL_RECORDS", small)
        given = large([(70, 20), (64, 0)], 1, (DIM, DIM), torch.float16, 1, heads=1, times="hours")
        grads.append(gradients(given))
        starts.append(bias_packed.num_parts(4, given.options["layout"]))
    assert starts == [1, 2]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-10, atol=1e-6)  # in float16


test_the_kernel_in_the_emulator = harness.interpreter_test(__file__)


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled in the interpreter")
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_programs_share_a_processor_and_no_product_waits(every, dtype, tmp_path):
    """Registers without spills, shared memory with that of the assembly, products under way at a time."""
    from recsys.ops.hstu_attention.bias.hopper_kernel import BLOCKS, biased_kernel
    from tests.ops.hstu_attention import test_triton_compile as compiling

    constants = {"WINDOWED": every, "TARGET_WINDOW": False, "GROUPED": every, "CONTEXTUAL_READS": True}
    constants |= compiling.assemblies_of("packed_sums", BLOCKS)
    types = compiling.POINTERS | {"time_table": "i32", "near": "u8", "records": "i32"}
    types = {name: f"*{kind}" for name, kind in (types | {"grad_k": dtype, "grad_v": dtype}).items()}
    shown = [name for name in biased_kernel.arg_names if name.endswith("_desc")]
    types |= dict.fromkeys(shown, descriptor_type(dtype, (1, 1, 64, DIM)))
    types |= {"rows_desc": descriptor_type("fp32", (1, 1, 64, DIM)), "alpha": "fp32", "inverse_scale": "fp32"}
    made = compile_kernel(biased_kernel, types, constants, tmp_path, other="i32")
    program = assembled(made, tmp_path)
    compiling.check_spills(program, DIM, 2)
    assert "serializ" not in program.report, program.report
    (declared,) = re.findall(r"(\d+) bytes smem", program.report)
    assert 2 * (made.metadata.shared + int(declared) + 1024) <= 228 * 1024
    packed = re.findall(r"packed_element = 32 .*-> tensor<64x64x\w+, (#\w+)>", made.asm["ttgir"])
    assert len(packed) == 2
    (layout,) = {re.findall(rf"^{name} = (.*)$", made.asm["ttgir"], re.MULTILINE)[0] for name in packed}
    assert "#ttg.nvidia_mma<{versionMajor = 3" in layout, layout
    assert "warpsPerCTA = [4, 1], instrShape = [16, 64, 16]" in layout, layout
