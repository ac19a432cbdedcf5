"""The kernel of `bucket_embedding` compiled for sm_90a, without a GPU: no spills, wide accesses, traceable.

All shapes with `--slow`. Skips without Triton.
"""

import os

import pytest
import torch

from tests.tools.assembled import assemble

triton = pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled in the interpreter", allow_module_level=True)


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(
    ("width", "kind", "tables"),
    [(256, "*fp32", 2)]
    + [pytest.param(*shape, marks=pytest.mark.slow) for shape in ((512, "*bf16", 2), (100, "*fp32", 1))],
)
def test_it_fits_into_the_registers_and_moves_16_bytes_at_a_time(width, kind, tables, tmp_path):
    from recsys.ops.bucket_embedding.triton_kernels import embed_kernel
    from recsys.ops.jagged.triton_ops import blocks_of, step_of

    blocks = blocks_of(width, 4)
    constants = {"W": width, "BLOCK_M": blocks.rows, "BLOCK": blocks.columns, "STEP": step_of([width])}
    constants |= {"TABLES": tables, "SCALE": width**0.5}
    kinds = {"x": kind, "table_0": "*fp32", "table_1": "*fp32", "out": "*fp32"}
    found = assemble(embed_kernel, kinds, constants, tmp_path)
    assert found.spills == 0 and max(found.accesses) == 128


def test_a_traced_graph_holds_the_kernels_of_the_gradient():
    from torch._library.triton import set_wrap_triton_enabled
    from torch.fx.experimental.proxy_tensor import make_fx

    from recsys.ops.bucket_embedding import triton_ops

    def sums(values, buckets):
        segments = triton_ops.sorted_by_bucket(buckets, 5)
        return triton_ops.launch_sums(values, segments, torch.float32, torch.library.wrap_triton)

    with set_wrap_triton_enabled(True):
        traced = make_fx(sums, tracing_mode="symbolic")(torch.randn(33, 24), torch.randint(5, (33,)))
    kernels = [node for node in traced.graph.nodes if "triton_kernel_wrapper" in str(node.target)]
    assert len(kernels) == 2 and not isinstance(kernels[0].kwargs["grid"][0][0], int)
