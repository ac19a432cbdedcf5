"""The kernels of `linear_logp` compiled for sm_90a, without a GPU: no spills, and matrix instructions.

All widths and types with `--slow`; without, one. Skips without Triton.
"""

import itertools
import os
import subprocess

import pytest
import torch

from recsys import environment
from recsys.ops.linear_logp.recompute import Operands

triton = pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled in the interpreter", allow_module_level=True)

MATRICES = ("hidden", "weight", "own", "other")
TYPES = {"target": "*i64", "candidate_ids": "*i64", "target_ids": "*i64", "rows": "*i32", "marks": "*u8"}
NAMES = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
SHARED_MEMORY = 227 * 1024
WIDTHS = {torch.bfloat16: (64, 128, 256, 512), torch.float32: (64, 128)}


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    environment.prefer_packaged_ptxas()


def operands(width, dtype, *, full):
    """Without rows: with everything optional, or with targets only, which is the loss over a catalogue."""
    matrix, ids = torch.empty(0, width, dtype=dtype), torch.empty(0, dtype=torch.int64)
    scale = torch.ones(1)
    return Operands(matrix, matrix, scale if full else None, scale, ids, *([ids if full else None] * 2))


def compiled(kernel, dtype, constants):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from recsys.ops.linear_logp import triton_kernels

    function, constants = getattr(triton_kernels, kernel), dict(constants)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants}
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    signature, aligned = {}, {}
    for index, name in enumerate(function.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.startswith(("num_", "tiles_")):
            signature[name] = "i32"
        elif name in MATRICES or (name == "grad" and constants["OF_WEIGHT"]):
            signature[name] = NAMES[dtype]
        else:
            signature[name] = TYPES.get(name, "*fp32")
        if signature[name].startswith("*"):
            aligned[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def spills(ptx, folder):
    (folder / "kernel.ptx").write_text(ptx)
    command = [environment.find_ptxas(), "-v", "--gpu-name=sm_90a", "kernel.ptx", "-o", "cubin"]
    report = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stderr
    return "0 bytes spill stores, 0 bytes spill loads" not in report, report


USUAL = (128, torch.bfloat16, False)
KINDS = [
    pytest.param(*kind, marks=[] if kind == USUAL else pytest.mark.slow)
    for dtype, widths in WIDTHS.items()
    for kind in itertools.product(widths, [dtype], (False, True))
]
"""Width, type, with everything optional."""


@pytest.mark.parametrize("kernel", ["forward", "of hidden", "of weight"])
@pytest.mark.parametrize(("width", "dtype", "full"), KINDS)
def test_it_fits_into_registers_and_shared_memory(width, dtype, full, kernel, tmp_path):
    from recsys.ops.linear_logp import triton_ops

    given = operands(width, dtype, full=full)
    tables = {
        "forward": triton_ops.FORWARD,
        "of hidden": triton_ops.OF_HIDDEN,
        "of weight": triton_ops.OF_WEIGHT,
    }
    blocks = triton_ops.blocks_of(given, tables[kernel])
    constants = triton_ops.constants_of(given, blocks)
    if kernel != "forward":
        of_weight = kernel == "of weight"
        constants |= {"OF_WEIGHT": of_weight, "WITH_BIAS": of_weight and full, "WITH_SCALE": False}
    name = "forward_kernel" if kernel == "forward" else "backward_kernel"
    found = compiled(name, dtype, constants)
    assert found.metadata.shared * blocks.programs <= SHARED_MEMORY
    is_spilling, report = spills(found.asm["ptx"], tmp_path)
    assert not is_spilling, report
    if dtype == torch.bfloat16:
        assert "wgmma" in found.asm["ptx"] and "cp.async" in found.asm["ptx"]


def test_a_traced_graph_holds_the_kernels():
    from torch._library.triton import set_wrap_triton_enabled
    from torch.fx.experimental.proxy_tensor import make_fx

    from recsys.ops.linear_logp import launch as launching
    from recsys.ops.linear_logp import triton_ops
    from recsys.ops.linear_logp.recompute import OutputGrads, RequestedGrads

    def both(hidden, weight, scale, target):
        launch, given = (
            launching.launch_traced,
            Operands(hidden, weight, None, scale, target, None, None),
        )
        parts = triton_ops.launch_forward(given, launch)
        found = triton_ops.launch_backward(
            given, OutputGrads(*parts), RequestedGrads(True, True, False, True), launch
        )
        return [*parts, found.hidden, found.weight]

    hidden, weight = torch.randn(33, 24), torch.randn(50, 24)
    with set_wrap_triton_enabled(True):
        traced = make_fx(both, tracing_mode="symbolic")(hidden, weight, torch.ones(1), torch.arange(33))
    kernels = [node for node in traced.graph.nodes if "triton_kernel_wrapper" in str(node.target)]
    assert len(kernels) == 4 and not isinstance(kernels[0].kwargs["grid"][0][0], int)
