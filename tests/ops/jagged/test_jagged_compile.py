"""The kernels of `gather_rows` compiled for sm_90a, without a GPU: no spills, wide accesses, traceable.

All shapes with `--slow`. Skips without Triton.
"""

import os

import pytest
import torch

from tests.tools.assembled import assemble

triton = pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled in the interpreter", allow_module_level=True)

# Columns and bytes of a number, and how many sources.
SHAPES = [(256, 4, 4), (512, 4, 1), (256, 2, 3), (768, 4, 2), (100, 4, 1), (1, 8, 4), (3, 1, 2)]
SOURCES = tuple(f"source_{number}" for number in range(4))


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def constants_of(width, itemsize):
    from recsys.ops.jagged import triton_ops

    blocks = triton_ops.blocks_of(width, itemsize)
    return {
        "W": width,
        "BLOCK_M": blocks.rows,
        "BLOCK": blocks.columns,
        "STEP": triton_ops.step_of([width]),
        "num_warps": blocks.num_warps,
    }


@pytest.mark.parametrize(
    ("width", "itemsize", "sources"),
    [pytest.param(*shape, marks=[] if shape == SHAPES[0] else pytest.mark.slow) for shape in SHAPES],
)
def test_gather(width, itemsize, sources, tmp_path):
    from recsys.ops.jagged.triton_ops import gather_kernel

    kinds = dict.fromkeys((*SOURCES, "out"), f"*i{8 * itemsize}")
    constants = {"SOURCES": sources, **constants_of(width, itemsize)}
    found = assemble(gather_kernel, kinds, constants, tmp_path)
    assert found.spills == 0
    if width * itemsize % 16 == 0:
        # Indices by 64 bits, rows in the widest accesses that there are.
        assert set(found.accesses) == {64, 128} and found.accesses.count(128) >= 2


@pytest.mark.parametrize(
    ("width", "kind"), [(256, "*fp32"), pytest.param(1, "*fp32", marks=pytest.mark.slow), (512, "*bf16")]
)
def test_sums(width, kind, tmp_path):
    from recsys.ops.jagged.triton_ops import sum_kernel

    found = assemble(sum_kernel, {"given": kind, "out": kind}, constants_of(width, 4), tmp_path)
    assert found.spills == 0 and (width == 1 or max(found.accesses) == 128)


def test_blocks_hold_whole_rows_or_equal_parts_of_them():
    from recsys.ops.jagged.triton_ops import blocks_of, step_of

    for width in range(1, 3000):
        columns = blocks_of(width, 4).columns
        assert columns & (columns - 1) == 0 and columns <= 1024
        covered = -(-width // columns) * columns
        assert covered == width or columns == min(1024, 1 << (width - 1).bit_length())
    assert [step_of(strides) for strides in ([256], [24, 256], [100, 16], [3], [0])] == [16, 8, 4, 1, 16]


def test_a_traced_graph_holds_the_kernels():
    from torch._library.triton import set_wrap_triton_enabled
    from torch.fx.experimental.proxy_tensor import make_fx

    from recsys.ops.jagged import triton_ops

    def both(first, second, index, places):
        wrap = torch.library.wrap_triton
        out = triton_ops.launch_gather([first, second], index, wrap)
        return out, triton_ops.launch_sum(out, places, first.shape[0] + second.shape[0], wrap)

    values = torch.randn(33, 24, dtype=torch.bfloat16)
    index, places = torch.arange(20), torch.arange(2 * 66).view(2, 66) - 100
    with set_wrap_triton_enabled(True):
        traced = make_fx(both, tracing_mode="symbolic")(values, values, index, places)
    kernels = [node for node in traced.graph.nodes if "triton_kernel_wrapper" in str(node.target)]
    assert len(kernels) == 2 and not isinstance(kernels[0].kwargs["grid"][0][0], int)
