"""The kernels of `bucket_embedding` compiled for sm_90a, without a GPU: no spills, wide accesses, traceable.

All shapes with `--slow`. Skips without Triton.
"""

import pytest
import torch

from tests.ops import harness
from tests.tools.assembled import assemble, needs_compiler

pytestmark = needs_compiler


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


# Columns, whether a program has several segments.
SHAPES = [(256, False), (512, False), (100, False), (1, False), (64, True), (1, True)]


@pytest.mark.parametrize("kind", ["*fp32", pytest.param("*bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("width", "several"),
    [pytest.param(*shape, marks=[] if shape in SHAPES[:1] else pytest.mark.slow) for shape in SHAPES],
)
def test_pieces_of_segments(width, several, kind, tmp_path):
    from recsys.ops.bucket_embedding import segment_kernels, segments
    from recsys.ops.jagged.triton_ops import step_of

    block = min(1 << (width - 1).bit_length(), segments.LONGEST_BLOCK)
    rows = segments.rows_of(block)
    constants = {"W": width, "BLOCK_M": rows, "BLOCK": block, "STEP": step_of([width])}
    constants |= {"TOGETHER": rows if several else 1}
    kinds = {"values": kind, "out": kind, "partial": "*fp32", "segments": "*i16"}
    found = assemble(segment_kernels.pieces_kernel, kinds, constants, tmp_path)
    assert found.spills == 0 and (width % 64 or max(found.accesses) == 128)


@pytest.mark.parametrize("width", [256, pytest.param(1, marks=pytest.mark.slow)])
def test_shares_of_segments(width, tmp_path):
    from recsys.ops.bucket_embedding import segment_kernels, segments

    block = min(1 << (width - 1).bit_length(), segments.SHARE_COLUMNS)
    constants = {"W": width, "BLOCK_M": segments.rows_of(block), "BLOCK": block}
    kinds = {"out": "*fp32", "partial": "*fp32"}
    found = assemble(segment_kernels.shares_kernel, kinds, constants, tmp_path)
    assert found.spills == 0 and (width == 1 or max(found.accesses) == 128)


def test_a_traced_graph_holds_the_kernels_of_the_gradient():
    from recsys.ops.bucket_embedding import segments, triton_ops

    def sums(values, buckets):
        ordered = triton_ops.sorted_by_bucket(buckets, 5)
        return segments.launch_sums(values, ordered, torch.float32, torch.library.wrap_triton)

    harness.assert_traced(sums, torch.randn(33, 24), torch.randint(5, (33,)), kernels=2)
