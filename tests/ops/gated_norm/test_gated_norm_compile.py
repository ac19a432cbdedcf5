"""The kernels of `gated_norm` compiled for sm_90a, without a GPU: no spills, wide accesses.

All widths with `--slow`; without, one. Skips without Triton.
"""

import os
import re
import subprocess

import pytest
import torch

from recsys import environment

triton = pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled in the interpreter", allow_module_level=True)

NUMBERS = {"weight": "*fp32", "bias": "*fp32", "sums": "*fp32", "seed": "*i64"}
SHAPES = [(256, 4), (64, 4), (1024, 1), (2048, 1), (4096, 1), (100, 4), (1, 16)]


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled(kernel, width, groups, concat):
    """A kernel for bfloat16 tokens, float32 parameters and dropout."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from recsys.ops.gated_norm import triton_kernels, triton_ops

    function, five = getattr(triton_kernels, kernel), concat and kernel == "backward_kernel"
    per_warp = triton_ops.ENTRIES_PER_WARP_OF_FIVE if five else triton_ops.ENTRIES_PER_WARP
    blocks = triton_ops.blocks_of(width, per_warp)
    options = triton_ops.Options(groups, 1e-6, concat, 0.2)
    constants = triton_ops._constants(width * groups, options, blocks)
    num_warps = constants.pop("num_warps")
    constants |= {name: 3 * width * groups for name in function.arg_names if name.startswith("STRIDE_")}
    signature, aligned = {}, {}
    for index, name in enumerate(function.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        else:
            signature[name] = NUMBERS.get(name, "i32" if name.startswith("num_") else "*bf16")
        if signature[name].startswith("*"):
            aligned[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})


@pytest.mark.parametrize("concat", [True, False])
@pytest.mark.parametrize("kernel", ["forward_kernel", "backward_kernel"])
@pytest.mark.parametrize(
    ("width", "groups"),
    [pytest.param(*shape, marks=[] if shape == SHAPES[0] else pytest.mark.slow) for shape in SHAPES],
)
def test_it_fits_into_the_registers_and_moves_16_bytes_at_a_time(width, groups, kernel, concat, tmp_path):
    environment.prefer_packaged_ptxas()
    ptx = compiled(kernel, width, groups, concat).asm["ptx"]
    (tmp_path / "kernel.ptx").write_text(ptx)
    command = [environment.find_ptxas(), "-v", "--gpu-name=sm_90a", "kernel.ptx", "-o", "cubin"]
    report = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in report, report
    if width % 8 == 0:
        moves = re.findall(r"(?:ld|st)\.global\S*\.v(\d)\.b32", ptx)
        assert moves and set(moves) <= {"2", "4"} and moves.count("4") >= 2


@pytest.mark.parametrize("concat", [True, False])
def test_a_traced_graph_holds_the_kernels(concat):
    from torch._library.triton import set_wrap_triton_enabled
    from torch.fx.experimental.proxy_tensor import make_fx

    from recsys.ops.gated_norm import triton_ops

    options = triton_ops.Options(2, 1e-6, concat, 0.2)

    def both(a, u, weight, bias, seed):
        wrap = torch.library.wrap_triton
        out = triton_ops.launch_forward(a, u, weight, bias, seed, options, wrap)
        return [out, *triton_ops.launch_backward(out, a, u, weight, bias, seed, options, wrap)]

    a, weight = torch.randn(33, 24, dtype=torch.bfloat16), torch.randn(24)
    with set_wrap_triton_enabled(True):
        traced = make_fx(both, tracing_mode="symbolic")(a, a, weight, weight, torch.tensor([5]))
    kernels = [node for node in traced.graph.nodes if "triton_kernel_wrapper" in str(node.target)]
    assert len(kernels) == 2 and not isinstance(kernels[0].kwargs["grid"][0][0], int)
