"""The forward kernel in the form that packages embed: its numbers, its code, and how Inductor gets it."""

import zipfile
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")

import triton
from torch._higher_order_ops.triton_kernel_wrap import get_mutated_tensors, kernel_side_table
from torch._inductor.codegen.common import TritonScratchWorkspace
from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides
from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.hints import DeviceProperties, HeuristicType
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

from recsys import environment
from recsys.ops import AttentionMask, SequenceLayout, hstu_attention, offsets_from_lengths
from recsys.ops.hstu_attention import Problem, hopper
from recsys.ops.hstu_attention.hopper import forward
from recsys.ops.runtime import embedding
from tests.ops import harness
from tests.ops.cases import layout_of, samples
from tests.ops.hstu_attention.emulated import inputs, results
from tests.ops.hstu_attention.test_hopper_compile import check_loop
from tests.tools.assembled import assembled, needs_gluon
from tests.tools.gluon_emulator import Emulated
from tests.tools.packaged import assert_packaged

pytestmark = needs_gluon

FORWARD = [(128, forward.LONG_SIZES[128]), (64, forward.LONG_SIZES[64]), *forward.SIZES.items()]


@pytest.mark.parametrize(
    ("mask", "contextual", "dim", "scale_len", "heads"),
    [
        (AttentionMask(), 0, 64, 600.0, 1),
        (AttentionMask(window=40, prefix=9), 3, 64, 50.0, 2),
        (AttentionMask(130, 70, True, 5), 70, 128, 600.0, 1),
    ],
)
def test_it_computes_what_the_reference_does(mask, contextual, dim, scale_len, heads, monkeypatch):
    kernels = {hopper.forward_stand_in: Emulated(hopper.packaged_forward_kernel)}
    monkeypatch.setattr(hopper, "wrap_triton", kernels.__getitem__)
    monkeypatch.setattr(hopper, "num_processors", lambda device: 3)
    layout = layout_of(samples(contextual, [(150, 3), (0, 2), (0, 0), (260, 0), (20, 20)]))
    tensors = inputs(layout.total_len, dim, heads)
    got = hopper.call_packaged(*tensors[:3], Problem(layout, mask, dim**-0.5, scale_len))
    exact, theirs = (results(layout, mask, tensors, dtype)[0] for dtype in (torch.float64, torch.bfloat16))
    scale = scale_len / 50.0  # `results` divides by 50
    harness.assert_as_near([got.double() * scale], [theirs.double()], [exact], floor=1e-3)


def autotuner(dim, sizes):
    """Inductor's compiler of the stand-in, with what Inductor of PyTorch 2.11 gives it for a model with one
    contextual token: numbers that are 1 are constants, and floats have 64 bits."""
    numbers = {"num_items", "num_heads", "row_q", "row_k", "row_v", "stride_q", "stride_k", "stride_v"}
    types = dict.fromkeys(("q", "k", "v", "out"), "*bf16") | {"items": "*i64", "counter": "*i32"}
    types |= {
        "half_alpha": "fp64",
        "inverse_scale": "fp64",
        **dict.fromkeys(numbers | {"window", "prefix"}, "i32"),
    }
    constants = forward.forward_constants(dim, sizes, AttentionMask())
    constants |= {"num_contextual": 1, "group_size": 1}
    del constants["num_warps"]
    kernel = hopper.forward_stand_in
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    aligned = [
        name.startswith(("row", "stride")) or signature[name].startswith("*") for name in kernel.arg_names
    ]
    meta = {
        "signature": signature,
        "device": DeviceProperties("cuda", 0, 132, 90, warp_size=32),
        "constants": constants,
        "configs": [{(i,): [["tt.divisibility", 16]] for i, is_aligned in enumerate(aligned) if is_aligned}],
    }
    config = triton.Config({}, num_warps=forward.WARPS)
    kind = HeuristicType.USER_AUTOTUNE
    made = triton_heuristics.CachingAutotuner(kernel, meta, [config], None, [], False, kind, inductor_meta={})
    return made, config


def compiled_by_inductor(dim, sizes, monkeypatch, folder):
    """Compiles the stand-in as Inductor does, without machine code."""
    environment.prefer_packaged_ptxas()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "cache"))
    monkeypatch.setattr(CUDABackend, "make_cubin", lambda *_: b"")
    monkeypatch.setattr(triton_heuristics.triton_helpers, "set_driver_to_gpu", lambda: None)
    made, config = autotuner(dim, sizes)
    return made._precompile_config(config).kernel


@pytest.mark.parametrize(
    ("dim", "sizes"), [FORWARD[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in FORWARD[1:])]
)
def test_inductor_compiles_the_kernel_in_place_of_its_stand_in(dim, sizes, monkeypatch, tmp_path):
    """In 32 bits, for as many warps as the kernel has, within the memory that a program may have. The code is
    that of the kernel itself: `test_hopper_compile.py` compiles it again with `--slow` only."""
    with embedding.embedding() as block:
        embedding.launched(hopper.forward_stand_in)
        compiled = compiled_by_inductor(dim, sizes, monkeypatch, tmp_path)
    assert block.compiled == block.launched == {"forward_stand_in"}
    assert compiled.src.fn is hopper.packaged_forward_kernel
    assert compiled.metadata.name == "packaged_forward_kernel"
    assert compiled.metadata.num_warps == 4 * sizes.strips + 4  # one loads, but warps come in groups
    assert compiled.metadata.global_scratch_size == 4 * 128
    program = assembled(compiled, tmp_path)
    program.check_resources(sizes.strips * sizes.computing_registers + sizes.loading_registers, 128)
    assert len(program.product_loops) == 2 * sizes.strips
    assert sum("FSEL" in " ".join(loop) for loop in program.product_loops) == sizes.strips
    for loop in program.product_loops:
        check_loop(loop, dim, sizes.keys)
        assert not any("F64" in line or line.startswith("D") for line in loop)


def test_outside_of_the_block_inductor_compiles_the_stand_in(monkeypatch, tmp_path):
    with embedding.embedding():
        pass
    compiled = compiled_by_inductor(64, forward.SIZES[64], monkeypatch, tmp_path)
    assert compiled.metadata.name == "forward_stand_in"


def test_a_compiler_sees_what_is_written(monkeypatch):
    """Otherwise it would copy or, worse, reuse other tensors."""
    target = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    monkeypatch.setattr(triton.runtime.driver, "_active", target, raising=False)
    monkeypatch.setattr(type(triton.runtime.driver), "active", target, raising=False)
    tensors = {name: torch.zeros(1, dtype=torch.bfloat16) for name in ("q", "k", "v", "out")}
    tensors |= {"items": torch.zeros(1, dtype=torch.int64), "counter": torch.zeros(1, dtype=torch.int32)}
    numbers = {name: 2 for name in hopper.forward_stand_in.arg_names if name not in tensors}
    kernel = kernel_side_table.add_kernel(hopper.forward_stand_in)
    written = get_mutated_tensors(kernel, kernel_side_table.add_constant_args(numbers), tensors, {})
    assert sorted(written) == ["counter", "out"]


def test_a_stand_in_with_other_parameters_is_refused():
    with pytest.raises(TypeError, match="forward_stand_in needs the parameters of forward_kernel"):
        embedding.embed(hopper.forward_stand_in, forward.forward_kernel)


def test_a_stand_in_that_was_compiled_elsewhere_is_an_error():
    with pytest.raises(RuntimeError, match="did not compile forward_stand_in"), embedding.embedding():
        embedding.launched(hopper.forward_stand_in)


def test_every_program_has_scratch_memory_of_its_own():
    """Here and with the code of PyTorch 2.11."""

    def of_a_program(self, idx, workspace, prefix=None):
        return [f"int64_t size[] = {{{workspace.size}}};", "int64_t stride[] = {1};"], "scratch"

    for allocation in (of_a_program, CUDADeviceOpOverrides.cpp_scratch):
        scaled = embedding._scratch_of_all_programs(allocation)
        lines, _ = scaled(CUDADeviceOpOverrides(), 7, TritonScratchWorkspace(512, lambda: "uint8"), "global")
        assert lines[0].count("* grid_0 * grid_1 * grid_2};") == 1 and "512" in lines[0]
        assert lines[1].endswith(" = {1};")


class Attend(torch.nn.Module):
    """Attention over parts of one tensor; `carrier` [max_len] holds no numbers."""

    def forward(self, x, lengths, num_targets, carrier):
        sizes = (x.shape[0], carrier.shape[0], x.shape[0])
        layout = SequenceLayout.trusted(lengths, offsets_from_lengths(lengths), num_targets, 1, *sizes)
        q, k, v = (part.view(-1, 2, 128) for part in (x * 2).split(2 * 128, dim=1))
        return (hstu_attention(q, k, v, layout, AttentionMask(window=100, prefix=9), scale_len=600.0),)


@pytest.mark.gpu
@pytest.mark.slow
def test_a_package_with_the_kernel_serves_all_sizes(tmp_path):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    batches = []
    for shapes in ([(150, 3), (20, 5), (260, 0)], [(0, 2)], [(900, 40), (0, 0), (1, 140)] * 40):
        layout = layout_of(samples(1, shapes))
        x = harness.normal(layout.total_len, 6 * 128, dtype=torch.bfloat16)
        batch = (x, layout.lengths, layout.num_targets, torch.empty(layout.max_len))
        batches.append(tuple(tensor.to("cuda") for tensor in batch))
    dims = tuple({0: torch.export.Dim(name, min=0)} for name in ("tokens", "rows", "rows", "longest"))
    module = Attend()
    with torch.no_grad(), embedding.embedding() as block:
        with torch.fx.experimental._config.patch(backed_size_oblivious=True):
            program = torch.export.export(module, batches[0], dynamic_shapes=dims, strict=False)
        with torch._inductor.config.patch(compile_threads=1):
            assert_packaged(program, module, batches, tmp_path, atol=2e-3)
    assert block.compiled == {"forward_stand_in"}
    with zipfile.ZipFile(tmp_path / "model.pt2") as package:
        (code,) = (name for name in package.namelist() if name.endswith(".wrapper.cpp"))
        assert b'"packaged_forward_kernel"' in package.read(code)
