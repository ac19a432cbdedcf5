"""Cutting samples into padded chunks: nothing lost, little padded, no chunk too large, same numbers."""

import pytest
import torch

from recsys.ops import AttentionMask, SequenceLayout, hstu_attention, softmax_attention
from recsys.ops.jagged import padding
from recsys.ops.jagged.padding import padded_chunks
from tests.ops import oracle
from tests.ops.cases import layout_of, qkv, samples

LENGTHS = [5, 0, 199, 200, 1, 64, 60, 3, 0, 150]


def chunks_of(lengths, num_heads=1):
    return padded_chunks(SequenceLayout(torch.tensor(lengths, dtype=torch.int64)), AttentionMask(), num_heads)


@pytest.mark.parametrize("limits", [(2**15, 2**22), (0, 2**22), (2**40, 2**40), (2**40, 1)])
def test_every_row_comes_back(limits, monkeypatch):
    monkeypatch.setattr(padding, "CPU_LIMITS", padding.Limits(max_scores=limits[1], wasted_scores=limits[0]))
    padded = chunks_of(LENGTHS)
    values = torch.randn(sum(LENGTHS), 2, 3)
    parts = padded.split(values)
    assert torch.equal(padded.merge(parts), values)
    assert [part.shape[:2] for part in parts] == [(c.num_samples, c.max_len) for c in padded.chunks]
    assert sum(chunk.num_samples for chunk in padded.chunks) == len(LENGTHS)
    assert sum(part.count_nonzero() for part in parts) == values.numel()  # the rest is padding, and zero


def test_chunks_stay_small_and_waste_little():
    lengths = torch.randint(0, 300, (500,)).tolist()
    padded = chunks_of(lengths, num_heads=4)
    for chunk in padded.chunks:
        assert 4 * chunk.num_samples * chunk.max_len**2 <= padding.CPU_LIMITS.max_scores
    scores = 4 * sum(chunk.num_samples * chunk.max_len**2 for chunk in padded.chunks)
    useful = 4 * sum(length**2 for length in lengths)
    assert scores - useful <= len(padded.chunks) * padding.CPU_LIMITS.wasted_scores
    assert scores < 1.2 * useful < 4 * len(lengths) * max(lengths) ** 2 / 2


def test_a_sample_over_the_limit_is_a_chunk_of_its_own(monkeypatch):
    monkeypatch.setattr(padding, "CPU_LIMITS", padding.CPU_LIMITS._replace(max_scores=100))
    sizes = [(chunk.num_samples, chunk.max_len) for chunk in chunks_of([20, 3, 11, 3]).chunks]
    assert sizes == [(1, 20), (1, 11), (2, 3)]


def test_a_gpu_gets_fewer_and_larger_chunks():
    lengths = torch.randint(0, 201, (512,)).sort(descending=True).values.tolist()
    sizes = [(length, length) for length in lengths]
    on_cpu, on_gpu = (padding._chunk_ends(sizes, 1, it) for it in (padding.CPU_LIMITS, padding.GPU_LIMITS))
    assert len(on_gpu) <= 2 < 10 < len(on_cpu)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_without_tokens_there_is_one_empty_chunk(lengths):
    (chunk,) = chunks_of(lengths).chunks
    assert (chunk.num_samples, chunk.max_len) == (len(lengths), 0)


@pytest.mark.parametrize("limits", [(0, 1), (2**40, 2**40)])
def test_attention_is_the_same_however_it_is_cut(limits, monkeypatch):
    monkeypatch.setattr(padding, "CPU_LIMITS", padding.Limits(max_scores=limits[1], wasted_scores=limits[0]))
    batch, mask = samples(1), AttentionMask(window=2)
    layout = layout_of(batch)
    inputs = qkv(layout.total_len)
    silu = hstu_attention(*inputs, layout, mask, scale_len=3)
    torch.testing.assert_close(silu, oracle.hstu(*inputs, batch, mask, 3**-0.5, 3), rtol=1e-11, atol=1e-12)
    soft = softmax_attention(*inputs, layout, mask)
    torch.testing.assert_close(soft, oracle.softmax(*inputs, batch, mask, 3**-0.5), rtol=1e-10, atol=1e-11)
