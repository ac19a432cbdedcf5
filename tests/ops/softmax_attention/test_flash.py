"""The backend `flash`: on a CPU around a stand-in for its kernels with their contract, on a GPU as it is."""

import dataclasses
import inspect
from itertools import pairwise

import pytest
import torch

from recsys.ops import AttentionMask, SequenceLayout, last_backend, softmax_attention
from recsys.ops.attention_args import AttentionFacts
from recsys.ops.softmax_attention import flash
from tests.ops import harness
from tests.ops.harness import Runner
from tests.ops.softmax_attention.test_softmax_attention import by_loops, problem

SHAPES = [(5, 0), (0, 0), (1, 0), (9, 0)]
MASKS = [AttentionMask(), AttentionMask(window=1), AttentionMask(window=4), AttentionMask(window=50)]
ON_GPU = Runner("flash", "cuda")
SIGNATURE = inspect.signature(flash.varlen_attn)


def kernels(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size):
    """Computes as `varlen_attn` documents, and scales hidden scores, too, as FlashAttention does."""
    SIGNATURE.bind(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and len(q) and len(k)
    assert q.shape[1:] == k.shape[1:] == v.shape[1:] and q.shape[2] % 8 == 0
    assert (cu_seq_q.diff().max(), cu_seq_k.diff().max()) == (max_q, max_k)
    assert window_size[1] == 0 or window_size == (-1, -1)
    outs = []
    for rows, keys in zip(*(pairwise(ends.tolist()) for ends in (cu_seq_q, cu_seq_k)), strict=True):
        query, key, value = q[slice(*rows)], k[slice(*keys)], v[slice(*keys)]
        ahead = torch.arange(len(query))[:, None] - torch.arange(len(key))
        visible = ((ahead >= 0) | (window_size[1] < 0)) & ((ahead <= window_size[0]) | (window_size[0] < 0))
        scores = torch.einsum("qhd,khd->hqk", query, key).masked_fill(~visible, -torch.inf) * scale
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(2), value))  # zeros without keys
    return torch.cat(outs)


def assert_asks_for(given, run, expected, alpha, monkeypatch):
    """Outputs and gradients of a backend around the stand-in are those of loops over the pairs."""
    monkeypatch.setattr(flash, "varlen_attn", kernels)
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in given.tensors.items()}
    got = run(
        *leaves.values(),
        *given.options.values(),
        alpha=leaves["q"].shape[2] ** -0.5 if alpha is None else alpha,
    )
    want = expected(**leaves, **given.options, alpha=alpha)
    harness.assert_close([got], [want], 1e-12)
    harness.assert_close(*(harness.gradients([out], list(leaves.values())) for out in (got, want)), 1e-12)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("dims", "alpha"), [((3, 2), None), ((5, 11), 0.7), ((8, 8), 0.0), ((3, 3), -2.0)])
def test_widths_windows_and_factors(mask, dims, alpha, monkeypatch):
    given = problem(SHAPES, 0, mask, heads=2, dims=dims)
    assert_asks_for(given, flash.run, by_loops, alpha, monkeypatch)


def test_a_batch_without_tokens():
    leaves = [torch.zeros(0, 2, width, requires_grad=True) for width in (3, 3, 5)]
    out = flash.run(*leaves, SequenceLayout(torch.tensor([0, 0])), AttentionMask(), alpha=1.0)
    gradients = torch.autograd.grad(out.sum(), leaves)
    assert [tensor.shape for tensor in (out, *gradients)] == [(0, 2, 5), (0, 2, 3), (0, 2, 3), (0, 2, 5)]


FACTS = AttentionFacts("cuda", torch.bfloat16, 2, 64, 64, AttentionMask(window=9), histories_only=True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"device": "cpu"}, "CUDA"),
        ({"dtype": torch.float32}, "not torch.float32"),
        ({"needs_grad": True, "deterministic": True}, "adds in any order"),
        ({"histories_only": False}, "without contextual tokens and targets"),
        ({"mask": AttentionMask(window=9, prefix=1)}, "prefix"),
        ({"v_dim": 257}, "257 columns"),
    ],
)
def test_what_it_takes(changes, reason, monkeypatch):
    monkeypatch.setattr(flash, "_has_kernels", lambda: True)
    support = flash.supports(dataclasses.replace(FACTS, **changes))
    assert support.ok == (not reason) and reason in support.reason


def test_targets_contextual_tokens_and_too_many_samples_are_not_for_it():
    q, lengths = torch.zeros(5, 1, 2), torch.tensor([3, 2])
    layouts = [
        SequenceLayout(lengths),
        SequenceLayout(lengths, torch.tensor([1, 0])),
        SequenceLayout(lengths, None, 1),
        SequenceLayout(torch.cat([lengths, torch.zeros(65_534, dtype=torch.int64)])),
    ]
    answers = [harness.facts_of(softmax_attention, q, q, q, layout).histories_only for layout in layouts]
    assert answers == [True, False, False, False]


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (50, 50), (32, 128)])
def test_on_a_gpu(dims, mask):
    given = problem([(200, 0), (0, 0), (1, 0), (333, 0), (64, 0)], 0, mask, heads=2, dims=dims)
    # An event that sees only itself has gradients of 0 for q and k, from differences that are rounded.
    rounding = 1e-3 if mask.window == 1 else 0.0
    harness.assert_near(given.cast(torch.bfloat16), ON_GPU, floor=2e-3, absolute=rounding)
    harness.assert_nothing_waits(given.cast(torch.bfloat16), ON_GPU)


@pytest.mark.gpu
def test_auto_takes_it_for_histories():
    q = torch.randn(5, 2, 16, device="cuda", dtype=torch.bfloat16)
    softmax_attention(q, q, q, SequenceLayout(torch.tensor([3, 2])).to("cuda"))
    assert last_backend("softmax_attention") == "flash"
    softmax_attention(q, q, q, SequenceLayout(torch.tensor([3, 2]), torch.tensor([1, 0])).to("cuda"))
    assert last_backend("softmax_attention") == "reference"
