"""The kernels of `segment_sum` compiled for sm_90a, without a GPU: no spills, wide accesses, traceable.

All shapes with `--slow`. Skips without Triton.
"""

import os

import pytest
import torch

from tests.tools.assembled import assemble

triton = pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled in the interpreter", allow_module_level=True)

# Columns, whether rows are looked up in an order, whether a program has several segments.
SHAPES = [(256, True, False), (256, False, True), (512, True, False), (64, False, True), (1, False, True)]
SHAPES += [(100, True, False), (1, True, False), (64, False, False)]


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("kind", ["*fp32", pytest.param("*bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("width", "ordered", "several"),
    [pytest.param(*shape, marks=[] if shape in SHAPES[:2] else pytest.mark.slow) for shape in SHAPES],
)
def test_pieces(width, ordered, several, kind, tmp_path):
    from recsys.ops.jagged.triton_ops import step_of
    from recsys.ops.segment_sum import triton_kernels, triton_ops

    block = min(1 << (width - 1).bit_length(), triton_ops.LONGEST_BLOCK)
    rows = triton_ops.rows_of(block)
    constants = {"W": width, "BLOCK_M": rows, "BLOCK": block, "STEP": step_of([width])}
    constants |= {"ORDERED": ordered, "TOGETHER": rows if several else 1}
    kinds = {"values": kind, "out": kind, "partial": "*fp32", "segments": "*i16" if ordered else "*i64"}
    found = assemble(triton_kernels.pieces_kernel, kinds, constants, tmp_path)
    assert found.spills == 0 and (width % 64 or max(found.accesses) == 128)


@pytest.mark.parametrize("width", [256, pytest.param(1, marks=pytest.mark.slow)])
def test_shares(width, tmp_path):
    from recsys.ops.segment_sum import triton_kernels, triton_ops

    block = min(1 << (width - 1).bit_length(), triton_ops.SHARE_COLUMNS)
    constants = {"W": width, "BLOCK_M": triton_ops.rows_of(block), "BLOCK": block}
    found = assemble(triton_kernels.shares_kernel, {"out": "*fp32", "partial": "*fp32"}, constants, tmp_path)
    assert found.spills == 0 and (width == 1 or max(found.accesses) == 128)


def test_a_traced_graph_holds_the_kernels():
    from torch._library.triton import set_wrap_triton_enabled
    from torch.fx.experimental.proxy_tensor import make_fx

    from recsys.ops.segment_sum import triton_ops

    def sums(values, lengths):
        segments = triton_ops.consecutive(lengths, values.shape[0])
        return triton_ops.launch_sums(values, segments, values.dtype, torch.library.wrap_triton)

    with set_wrap_triton_enabled(True):
        traced = make_fx(sums, tracing_mode="symbolic")(torch.randn(33, 24), torch.tensor([3, 30]))
    kernels = [node for node in traced.graph.nodes if "triton_kernel_wrapper" in str(node.target)]
    assert len(kernels) == 2 and not isinstance(kernels[0].kwargs["grid"][0][0], int)
