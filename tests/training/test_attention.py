"""Pictures of attention against the brute force of the ops, and against the ops inside real models."""

import logging

import pyarrow as pa
import pytest
import torch

from recsys.data.batch import Rows
from recsys.models import build_model
from recsys.ops import AttentionMask, RelativeBias, SequenceLayout, hstu_attention, softmax_attention
from recsys.ops.hstu_attention import reference as hstu_reference
from recsys.ops.softmax_attention import reference as softmax_reference
from recsys.training.attention import (
    AttentionCall,
    AttentionRecorder,
    attention_weights,
    shown_tokens,
    visible_keys,
)
from tests.modules.pipelines import RANKER, RANKERS, RETRIEVER, batch_of, pipeline_of, random_rows
from tests.ops import oracle

SASREC = {
    "ranker": "model { ranker { mixer { sasrec { num_heads: 2  num_layers: 3 } } } }",
    "retriever": "model { retriever { mixer { sasrec { num_heads: 2  num_layers: 3 } } } }",
}
HSTU = {
    "ranker": "model { ranker { mixer { hstu { num_layers: 3 } } } }",
    "retriever": "model { retriever { mixer { hstu { num_layers: 3 } } } }",
}
MODELS = {
    "hstu ranker": (RANKER, HSTU["ranker"]),
    "hstu retriever": (RETRIEVER, HSTU["retriever"]),
    "sasrec ranker": (RANKER, SASREC["ranker"]),
    "sasrec retriever": (RETRIEVER, SASREC["retriever"]),
    "bfloat16": (RANKER, HSTU["ranker"], "model { precision: BF16 }"),
}
MASKS = [
    AttentionMask(),
    AttentionMask(window=2, prefix=1, target_window=True, target_group_size=2),
    AttentionMask(contextual_reads_history=False, target_group_size=3),
]
SAMPLE = oracle.Sample(contextual=2, uih=6, targets=5)


def random_call(mask: AttentionMask, softmax: bool, with_bias: bool) -> AttentionCall:
    draw = torch.Generator().manual_seed(3)
    layout = SequenceLayout(torch.tensor([SAMPLE.length]), torch.tensor([SAMPLE.targets]), SAMPLE.contextual)
    q, k = (torch.randn(SAMPLE.length, 3, 4, generator=draw) for _ in range(2))
    bias = None
    if with_bias:
        times = torch.randint(0, 10**6, (2, SAMPLE.length), generator=draw)
        tables = torch.randn(3, 5, generator=draw), torch.randn(9, generator=draw)
        bias = RelativeBias(*tables, *times)
    return AttentionCall(q, k, layout, mask, 0.7, None if softmax else 6.0, bias)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("form", ["softmax", "silu", "silu with bias"])
def test_weights_are_those_of_the_formula(mask, form):
    call = random_call(mask, form == "softmax", form == "silu with bias")
    rows = torch.tensor([0, 3, 7, 9, 12])
    # With one-hot values an attention returns its weights.
    one_hot = torch.eye(SAMPLE.length, dtype=torch.float64)[:, None].expand(-1, 3, -1)
    q, k = call.q.double(), call.k.double()
    if form == "softmax":
        expected = oracle.softmax(q, k, one_hot, [SAMPLE], mask, 0.7)
    else:
        expected = oracle.hstu(q, k, one_hot, [SAMPLE], mask, 0.7, 6.0, call.bias)
    actual = attention_weights(call, rows)
    torch.testing.assert_close(actual.double(), expected[rows].transpose(0, 1), rtol=1e-5, atol=1e-6)
    seen = [[oracle.sees(SAMPLE, i, j, mask) for j in range(SAMPLE.length)] for i in rows.tolist()]
    assert visible_keys(call, rows).tolist() == seen
    assert not actual[:, ~visible_keys(call, rows)].any()


def record(model, batch, most: int = 3):
    recorder = AttentionRecorder(batch, most)
    with torch.no_grad(), recorder.watching():
        outputs = model(batch)
    return recorder.pictures(), outputs


def last_of(outputs):
    return outputs.logits if hasattr(outputs, "logits") else outputs.queries


@pytest.mark.parametrize("kind", MODELS)
def test_pictures_of_a_model_are_what_its_layers_compute(kind, monkeypatch):
    pipeline = pipeline_of(*MODELS[kind])
    torch.manual_seed(2)
    model = build_model(pipeline).eval()
    batch = batch_of(pipeline, random_rows(pipeline, [(0, 2), (3, 1), (6, 4), (1, 0)]))
    with torch.no_grad():
        expected_outputs = last_of(model(batch))
    calls = []
    for backend in (hstu_reference, softmax_reference):
        monkeypatch.setattr(backend, "run", spy(backend.run, calls))
    pictures, outputs = record(model, batch)
    assert torch.equal(last_of(outputs), expected_outputs)
    assert len(calls) == 3
    assert [(p.layer, p.num_layers) for p in pictures] == [(1, 3)] * 3 + [(3, 3)] * 3
    assert [p.sample for p in pictures] == ["row 4", "row 2", "row 3"] * 2
    tolerance = {"rtol": 2e-2, "atol": 2e-3} if kind == "bfloat16" else {"rtol": 1e-4, "atol": 1e-6}
    start, length = batch.layout.offsets.tolist(), batch.layout.lengths.tolist()
    for picture, row in zip(pictures, [3, 1, 2] * 2, strict=True):
        weights = calls[picture.layer - 1][start[row] : start[row + 1], :, start[row] : start[row + 1]]
        torch.testing.assert_close(picture.weights, weights.float().mean(1), **tolerance)
        assert len(picture.kinds) == picture.num_tokens == length[row]
        assert picture.kinds.tolist() == batch.layout.kinds()[start[row] : start[row + 1]].tolist()


def spy(run, calls):
    """The backend's `run`, which keeps the weights [T, H, T] of each call."""

    def watched(q, k, v, *args, **kwargs):
        one_hot = torch.eye(len(q))[:, None].expand(-1, q.shape[1], -1)
        calls.append(run(q.float(), k.float(), one_hot, *args, **kwargs))
        return run(q, k, v, *args, **kwargs)

    return watched


@pytest.mark.parametrize("kind", RANKERS)
def test_every_form_of_sequence_has_pictures(kind):
    pipeline = pipeline_of(*RANKERS[kind])
    batch = batch_of(pipeline, random_rows(pipeline, [(0, 2), (3, 1), (6, 4)]))
    pictures, _ = record(build_model(pipeline).eval(), batch)
    assert [picture.sample for picture in pictures] == ["row 2", "row 3"] * 2
    for picture in pictures:
        assert (picture.kinds == 2).sum() == {"row 2": 1, "row 3": 4}[picture.sample]
        assert picture.visible.diagonal().all() and picture.weights.isfinite().all()


def test_a_truncated_layer_has_the_tokens_that_are_left():
    groups = "layer_groups { num_layers: 1 } layer_groups { num_layers: 1  tail_len: 2 }"
    pipeline = pipeline_of(RANKER, f"model {{ ranker {{ mixer {{ hstu {{ {groups} }} }} }} }}")
    batch = batch_of(pipeline, random_rows(pipeline, [(5, 2)]))
    first, last = record(build_model(pipeline).eval(), batch)[0]
    contextual = [0] * batch.layout.num_contextual
    assert first.kinds.tolist() == [*contextual, 1, 1, 1, 1, 1, 2, 2]
    assert last.kinds.tolist() == [*contextual, 1, 1, 2, 2]


def test_users_are_different_ones_from_short_to_long_histories():
    pipeline = pipeline_of(RANKER)
    sizes = [(6, 1), (1, 1), (5, 1), (2, 1), (4, 1), (0, 1), (3, 1), (6, 1)]
    rows = random_rows(pipeline, sizes)
    rows = [row.changed(group=group, weight=w) for row, group, w in zip(
        rows, (7, 1, 2, 3, 4, 5, 7, 6), (1, 1, 1, 1, 1, 1, 1, 0), strict=True)]  # fmt: skip
    batch = batch_of(pipeline, rows)
    keys = pa.table({"user": ["g", "a", "b", "c", "d", "e", "g", "f"], "n": list(range(8))})
    batch.rows = Rows(torch.zeros(8), torch.zeros(8), keys)
    pictures, _ = record(build_model(pipeline).eval(), batch, most=3)
    # Users by length of history: a 1, c 2, d 4, b 5, g 6; the row of weight 0 is a filler.
    assert [p.sample for p in pictures] == ["user a, n 1", "user d, n 4", "user g, n 0"] * 2


def test_a_long_sample_shows_its_newest_events():
    layout = SequenceLayout(torch.tensor([30]), torch.tensor([9]), 6)
    assert shown_tokens(layout, 16).tolist() == [0, 1, 2, 3, *range(13, 21), 21, 22, 23, 24]
    assert shown_tokens(layout, 30).tolist() == list(range(30))
    few_targets = SequenceLayout(torch.tensor([30]), torch.tensor([1]), 0)
    assert shown_tokens(few_targets, 8).tolist() == list(range(22, 30))


def test_without_a_history_or_an_op_the_log_says_why(caplog):
    pipeline = pipeline_of(RANKER)
    batch = batch_of(pipeline, random_rows(pipeline, [(0, 2), (0, 1)]))
    caplog.set_level(logging.INFO)
    assert record(build_model(pipeline).eval(), batch)[0] == []
    assert "no row with a history" in caplog.text
    batch = batch_of(pipeline, random_rows(pipeline, [(2, 2)]))
    assert AttentionRecorder(batch, 2).pictures() == []
    assert "the model called no attention op" in caplog.text


def test_nobody_watches_afterwards():
    recorder = AttentionRecorder(batch_of(pipeline_of(RANKER), random_rows(pipeline_of(RANKER), [(2, 1)])), 1)
    with pytest.raises(RuntimeError, match="stop"), recorder.watching():
        raise RuntimeError("stop")
    call = random_call(AttentionMask(), softmax=False, with_bias=False)
    hstu_attention(call.q, call.k, call.k, call.layout, scale_len=1.0)
    softmax_attention(call.q, call.k, call.k, call.layout)
    assert recorder.pictures() == []
