"""A sample in the words of its file."""

import torch

from recsys import protos as pb
from recsys.data.batch import LayoutRule
from recsys.data.inspect import as_table, describe_sample
from recsys.data.loader import Loader


def test_tokens_of_a_ranking_row(sample):
    row = sample.row(3, events=3, candidates=2)
    row["uih_item_id"][1] = 4711
    sample.write([sample.row(1), row])
    batch = next(Loader.open(sample.pipeline, "train", LayoutRule(2, True)).epoch(0))
    tokens = describe_sample(batch, 1, sample.pipeline)
    ids = sample.vocabulary
    assert [t.position for t in tokens] == ["0", "1", "2", "3", "4", "5", "6"]
    assert [t.kind for t in tokens] == ["contextual"] * 2 + ["history"] * 3 + ["candidate"] * 2
    assert len(tokens) == int(batch.layout.lengths[1])
    bucket = int(batch.ids["user_id"].values()[1])
    assert [t.item for t in tokens[:2]] == [f"user_id=#{bucket}", "age=[-inf, 18)"]
    assert [t.item for t in tokens[2:5]] == [str(ids[3]), "unknown", str(ids[5])]
    assert [t.action for t in tokens[2:5]] == ["0s", "click 0.5s", "1s"]
    assert [t.time for t in tokens[2:4]] == ["1970-01-01 00:15:00", "1970-01-01 00:15:01"]
    assert [t.item for t in tokens[5:]] == [str(ids[0]), str(ids[3])]
    assert [t.action for t in tokens[5:]] == ["is_click=0 watch=0", "is_click=1 watch=1.5"]
    assert tokens[5].time == "1970-01-01 00:17:10"


def test_interleaved_events_and_joined_features(sample):
    sample.write([sample.row(3, events=2, candidates=1)])
    contextual = sample.pipeline.model.ranker.preprocessor.contextual
    contextual.action_placement = pb.ContextualPreprocessor.INTERLEAVED
    batch = next(Loader.open(sample.pipeline, "train", LayoutRule(1, True, tokens_per_event=2)).epoch(0))
    tokens = describe_sample(batch, 0, sample.pipeline)
    assert len(tokens) == int(batch.layout.lengths[0]) == 1 + 2 * 2 + 1
    assert [part.partition("=")[0] for part in tokens[0].item.split("; ")] == ["user_id", "age"]
    first, second = str(sample.vocabulary[3]), str(sample.vocabulary[4])
    assert [t.item for t in tokens[1:5]] == [first, "", second, ""]
    assert [t.action for t in tokens[1:5]] == ["", "0s", "", "click 0.5s"]
    assert tokens[1].time == tokens[2].time != tokens[3].time == tokens[4].time


def test_candidates_of_a_retriever_are_no_tokens(sample):
    sample.write([sample.row(1, events=2, candidates=1)])
    sample.pipeline.model.retriever.item_feature = "item_id"
    batch = next(Loader.open(sample.pipeline, "train", LayoutRule(0, False), mode="evaluate").epoch(0))
    tokens = describe_sample(batch, 0, sample.pipeline)
    assert [(t.position, t.kind) for t in tokens] == [("0", "history"), ("1", "history"), ("-", "candidate")]
    assert torch.equal(batch.layout.lengths, torch.tensor([2]))


def test_text_table(sample):
    sample.write([sample.row(1, events=1, candidates=0)])
    batch = next(Loader.open(sample.pipeline, "train", LayoutRule(2, True)).epoch(0))
    lines = as_table(describe_sample(batch, 0, sample.pipeline)).splitlines()
    assert lines[0].split() == ["position", "kind", "item", "action", "time"]
    assert lines[-1].split() == ["2", "history", "7", "0s", "1970-01-01", "00:15:00"]
    assert len(lines) == 4
