"""`Scorer`: its choice, and equal scores of all ways."""

from types import SimpleNamespace

import pytest
import torch

from recsys.modules.mixers import LinearMixer
from recsys.scoring import scorer
from recsys.scoring.prefill import CachedModel
from recsys.scoring.scorer import EagerModel, Scorer, Way
from recsys.training.evaluator import evaluate
from tests.modules.pipelines import RANKER, RANKERS, batch_of, pipeline_of, random_rows
from tests.scoring.test_prefill import build

SIZES = [(3, 2), (0, 1), (6, 7), (2, 0), (5, 12), (1, 3)]


class Watched(EagerModel):
    """Notes what it is asked for."""

    def __init__(self, model, device="cpu", **settings):
        super().__init__(model, **settings)
        self.asked, self.where = [], device

    @property
    def device(self):
        return torch.device(self.where)

    def run(self, batch):
        self.asked.append("run")
        return super().run(batch)

    def prefill(self, batch):
        assert batch.layout.total_targets == len(batch.candidate_timestamps) == 0
        self.asked.append("prefill")
        return super().prefill(batch)

    def score(self, batch, cache):
        assert len(batch.uih_timestamps) == 0
        self.asked.append(batch.num_candidates.tolist())
        return super().score(batch, cache)


@pytest.fixture(params=["plain", "all", "channels", "interleaved channels"], scope="module")
def pipeline(request):
    return pipeline_of(*RANKERS.get(request.param, (RANKER,)))


@pytest.mark.parametrize(("longest", "way"), [(12, Way.ONE_PASS), (11, Way.CACHE)])
@torch.no_grad()
def test_a_cpu_takes_the_cache_for_long_lists_and_the_scores_are_equal(pipeline, longest, way, monkeypatch):
    monkeypatch.setattr(scorer, "ONE_PASS", longest)
    model, batch = build(pipeline), batch_of(pipeline, random_rows(pipeline, SIZES))
    program = Watched(model)
    door = Scorer(program, pipeline, cached_piece=8)
    assert door.way(batch) is way
    actual, expected = door.score(batch), model(batch)
    torch.testing.assert_close(actual.logits, expected.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual.scores(), model.score(batch), rtol=1e-5, atol=1e-5)
    # By eights: 2, 1; 7 alone; 8 and 4 of the twelve; 3 beside the 4. A row without candidates has no piece.
    pieces = [[2, 1], [7], [8], [4, 3]]
    assert program.asked == (["run"] if way is Way.ONE_PASS else ["prefill", *pieces])


@torch.no_grad()
def test_multi_valued_candidates_stay_with_their_values():
    """Counts of values lie beside ids: a piece that begins in the middle must find both."""
    name = next(name for name, texts in RANKERS.items() if any("multi_valued: true" in t for t in texts))
    pipeline = pipeline_of(*RANKERS[name])
    model, batch = build(pipeline), batch_of(pipeline, random_rows(pipeline, SIZES))
    program = EagerModel(model)
    for size in (1, 3, 5):
        actual = Scorer(program, pipeline, size).score_cached(batch, program.prefill(batch))
        torch.testing.assert_close(actual.scores(), model.score(batch), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["on a GPU", "not allowed", "no candidates", "a mixer without a cache"])
@torch.no_grad()
def test_one_pass_is_taken_otherwise(case, monkeypatch):
    monkeypatch.setattr(scorer, "ONE_PASS", 0)
    linear = "model { ranker { mixer { linear { num_heads: 2  qk_dim: 4 } } } }"
    monkeypatch.setattr(LinearMixer, "keeps_cache", False)
    pipeline = pipeline_of(RANKER, linear) if "mixer" in case else pipeline_of(RANKER)
    sizes = [(3, 0), (0, 0)] if case == "no candidates" else SIZES
    model, batch = build(pipeline), batch_of(pipeline, random_rows(pipeline, sizes))
    device = "cuda" if case == "on a GPU" else "cpu"
    program = Watched(model, device, may_cache=case != "not allowed")
    door = Scorer(program, pipeline)
    assert door.way(batch) is Way.ONE_PASS
    assert door.score(batch).scores().shape == (sum(n for _, n in sizes), len(model.tasks))
    assert program.asked == ["run"]


@torch.no_grad()
def test_a_cache_without_candidates_scores_none():
    pipeline = pipeline_of(RANKER)
    model, batch = build(pipeline), batch_of(pipeline, random_rows(pipeline, [(3, 0), (0, 0)]))
    program = EagerModel(model)
    assert Scorer(program, pipeline).score_cached(batch, program.prefill(batch)).scores().shape == (0, 2)


@torch.no_grad()
def test_evaluation_takes_the_cache_for_long_lists_and_finds_the_same_numbers(monkeypatch):
    pipeline = pipeline_of(RANKER)
    model, prefilled, prefill = build(pipeline), [], CachedModel.prefill
    batches = [batch_of(pipeline, random_rows(pipeline, SIZES, seed)) for seed in (0, 1)]
    loader = SimpleNamespace(first=lambda _: iter(batches))
    monkeypatch.setattr(CachedModel, "prefill", lambda *given: prefilled.append(1) or prefill(*given))
    expected = evaluate(model, loader, torch.device("cpu"))
    assert prefilled == [] and "loss" in expected
    monkeypatch.setattr(scorer, "ONE_PASS", 11)
    actual = evaluate(model, loader, torch.device("cpu"))
    assert len(prefilled) == 2 and actual == pytest.approx(expected, rel=1e-5, nan_ok=True)
