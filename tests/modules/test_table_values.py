"""Initial values of large tables: the same for every division, and normal."""

import hashlib

import numpy as np
import pytest
import torch

from recsys.modules import table_values
from recsys.modules.embedding import EmbeddingGroup
from recsys.modules.table_values import BLOCK_ROWS, BlockNormal
from tests.modules.pipelines import RETRIEVER, pipeline_of

ROWS = 2 * BLOCK_ROWS + 100
VALUES = BlockNormal("item", 8, 0.5, seed=3)


def drawn(device: str) -> torch.Tensor:
    table = torch.empty(ROWS, 8, device=device)
    VALUES(table)
    return table


@pytest.fixture(scope="module")
def whole() -> torch.Tensor:
    return drawn("cpu")


def check_parts(whole: torch.Tensor) -> None:
    for rows in (1, 2, 3, 7):
        block = -(-ROWS // rows)
        for first in range(0, ROWS, block):
            part = torch.empty(min(block, ROWS - first), 8, device=whole.device)
            VALUES.fill(part, first)
            assert torch.equal(part, whole[first : first + block])
    columns = torch.empty(ROWS, 4, device=whole.device)
    VALUES.fill(columns, 0, 4)
    assert torch.equal(columns, whole[:, 4:])


def check_values(whole: torch.Tensor) -> None:
    # 66,000 draws: the standard deviation is known to 0.3 %.
    assert whole.std().item() == pytest.approx(0.5, rel=0.01)
    assert abs(whole.mean().item()) < 0.01
    assert not torch.equal(whole[:BLOCK_ROWS], whole[BLOCK_ROWS : 2 * BLOCK_ROWS])
    for changed in (BlockNormal("item", 8, 0.5, seed=4), BlockNormal("user", 8, 0.5, seed=3)):
        part = torch.empty(10, 8, device=whole.device)
        changed.fill(part)
        assert not torch.equal(part, whole[:10])


def test_a_part_has_the_values_of_the_whole_table(whole):
    check_parts(whole)


def test_values_are_normal_and_differ_between_blocks_seeds_and_tables(whole):
    check_values(whole)


@pytest.mark.gpu
def test_a_gpu_draws_what_it_needs_itself(whole):
    on_gpu = drawn("cuda")
    check_parts(on_gpu)
    check_values(on_gpu)


def test_a_gpu_would_draw_normal_blocks_that_differ(monkeypatch):
    """By its method, run on the CPU."""
    on_gpu, device = BlockNormal._block_on_a_gpu, torch.device("cpu")
    monkeypatch.setattr(BlockNormal, "_block", lambda self, number: on_gpu(self, number, device))
    as_on_gpu = drawn("cpu")
    check_parts(as_on_gpu)
    check_values(as_on_gpu)


def test_a_block_is_a_philox_stream_of_seed_table_and_number(whole):
    name = int.from_bytes(hashlib.sha256(b"item").digest()[:8], "big")
    stream = np.random.Philox(key=np.array([3, name], np.uint64)).advance(2 * 2**192)
    drawn = np.random.Generator(stream).standard_normal((100, 8), dtype=np.float32)
    np.testing.assert_array_equal(whole[2 * BLOCK_ROWS :].numpy(), drawn / 2)


def test_a_large_table_has_no_memory_until_it_is_materialized(monkeypatch):
    pipeline = pipeline_of(RETRIEVER)
    monkeypatch.setattr(table_values, "DRAWN_WHOLE", 8 * 8)
    torch.manual_seed(5)
    group = EmbeddingGroup(pipeline)
    (weight,) = (table.weight for table in group.tables["dim_8_large"].embeddings.values())
    assert weight.is_meta
    group.materialize()
    (weight,) = (table.weight for table in group.tables["dim_8_large"].embeddings.values())
    expected = torch.empty_like(weight)
    BlockNormal("item_id", 8, 0.5, seed=5).fill(expected)
    assert torch.equal(weight, expected)
