"""`cross_attention` against loops over samples, and its backend `flash` around a stand-in for the kernels."""

import dataclasses

import pytest
import torch

from recsys.ops import SequenceLayout, cross_attention, last_backend
from recsys.ops.softmax_attention import flash
from recsys.ops.softmax_attention.cross import flash as backend
from tests.ops import harness
from tests.ops.cases import qkv
from tests.ops.harness import Problem, Runner, assert_is, refused
from tests.ops.softmax_attention.test_flash import assert_asks_for

QUERIES, KEYS = [2, 0, 3, 1, 0, 4], [5, 3, 1, 0, 0, 70]


def attend(q, k, v, *, layout, key_layout, backend):
    return cross_attention(q, k, v, layout, key_layout, backend=backend)


def by_samples(q, k, v, *, layout, key_layout, alpha=None):
    alpha = q.shape[2] ** -0.5 if alpha is None else alpha
    parts = (q.split(layout.lengths.tolist()), *(x.split(key_layout.lengths.tolist()) for x in (k, v)))
    outs = []
    for query, key, value in zip(*parts, strict=True):
        scores = alpha * torch.einsum("qhd,khd->hqk", query, key)
        weights = scores.exp() / scores.exp().sum(2, keepdim=True)
        outs.append(torch.einsum("hqk,khd->qhd", weights, value))
    return torch.cat(outs)


def problem(queries=QUERIES, keys=KEYS, dims=(3, 2)) -> Problem:
    layout, key_layout = SequenceLayout(torch.tensor(queries)), SequenceLayout(torch.tensor(keys))
    dim, v_dim = dims
    q = qkv(sum(queries), dim=dim)[0]
    k, v = (tensor / 2 for tensor in qkv(sum(keys), dim=dim, v_dim=v_dim, seed=1)[1:])
    options = {"layout": layout, "key_layout": key_layout}
    return Problem("cross_attention", attend, {"q": q, "k": k, "v": v}, options)


def test_the_reference_is_that_of_loops_and_gives_zeros_without_keys():
    """Samples of 70 and of 1 key share no chunk on a CPU: 2^15 padded scores are too many for them."""
    assert_is(problem(), by_samples, close=1e-10)
    assert_is(problem(keys=[900, 3, 1, 0, 0, 900]), by_samples, close=1e-10)
    given = problem([1, 2], [0, 0])
    assert_is(given, by_samples, close=1e-12)


def test_all_tokens_of_a_sample_see_each_other_after_a_contextual_one():
    layout = SequenceLayout(torch.tensor([4, 1, 7]), None, 1)
    q, k, v = qkv(12)
    want = by_samples(q, k, v, layout=layout, key_layout=layout)
    torch.testing.assert_close(cross_attention(q, k, v, layout, layout), want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("dims", "alpha"), [((3, 2), None), ((5, 11), 0.7), ((8, 8), 0.0), ((3, 3), -0.5)])
def test_the_kernels_are_asked_for_the_same(dims, alpha, monkeypatch):
    assert_asks_for(problem(dims=dims), backend.run, by_samples, alpha, monkeypatch)
    given = problem([1, 0], [0, 0])
    assert not backend.run(**given.tensors, **given.options, alpha=1.0).any()


def test_what_the_kernels_take(monkeypatch):
    """Contextual tokens too, which see what others see."""
    monkeypatch.setattr(flash, "_has_kernels", lambda: True)
    few = SequenceLayout(torch.tensor([3, 2]), None, 1)
    most = torch.cat([torch.tensor([5]), torch.zeros(65_534, dtype=torch.int64)])
    more, q = torch.cat([most, most[1:2]]), torch.zeros(5, 2, 8)
    answers = []
    for layout in (few, SequenceLayout(most), SequenceLayout(more)):
        facts = dataclasses.replace(
            harness.facts_of(cross_attention, q, q, q, layout, layout), device="cuda", dtype=torch.bfloat16
        )
        answers.append(backend.supports(facts))
    assert [answer.ok for answer in answers] == [True, True, False]
    assert "up to 65535 samples" in answers[2].reason


@pytest.mark.gpu
def test_on_a_gpu():
    """Auto takes the kernels for 16 bits; a short query reads a long memory as in a decoder of codes."""
    given = problem([4] * 6, [1, 200, 64, 0, 129, 13], dims=(64, 64)).cast(torch.bfloat16)
    harness.assert_near(given, Runner("flash", "cuda"), floor=2e-3)
    harness.assert_nothing_waits(given, Runner("flash", "cuda"))
    layout = SequenceLayout(torch.tensor([3, 2]), None, 1).to("cuda")
    q = torch.randn(5, 2, 16, device="cuda", dtype=torch.bfloat16)
    cross_attention(q, q, q, layout, layout)
    assert last_backend("cross_attention") == "flash"


def arguments(**changes):
    given = {"q": torch.zeros(5, 2, 3), "k": torch.zeros(4, 2, 3), "v": torch.zeros(4, 2, 1)}
    lengths = {"layout": torch.tensor([3, 2]), "key_layout": torch.tensor([0, 4])}
    return given | {name: SequenceLayout(of) for name, of in lengths.items()} | changes


TARGETS = SequenceLayout(torch.tensor([0, 4]), torch.tensor([0, 1]))
WRONG = [
    ({"q": torch.zeros(4, 2, 3)}, ValueError, "q has 4 rows, the layout total_len = 5"),
    ({"k": torch.zeros(4, 2, 4)}, ValueError, "k must have the head dimension of q, 3, got 4"),
    ({"k": torch.zeros(4, 2, 3).double()}, TypeError, "k must be a tensor of the dtype of q, torch.float32"),
    ({"v": torch.zeros(5, 2, 3)}, ValueError, "v has 5 rows, the key_layout total_len = 4"),
    ({"v": torch.zeros(4, 1, 3)}, ValueError, r"v must have shape \[keys, 2, at least 1\]"),
    ({"key_layout": SequenceLayout(torch.tensor([4]))}, ValueError, "key_layout has 1 samples, layout 2"),
    ({"key_layout": [4]}, TypeError, "key_layout must be a SequenceLayout, got list"),
    ({"key_layout": TARGETS}, ValueError, "samples must hold no targets"),
]

test_wrong_arguments_are_named = refused(cross_attention, arguments, WRONG)
