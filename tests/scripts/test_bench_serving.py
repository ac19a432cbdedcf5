"""The benchmark of scoring with a cache at tiny sizes: all ways score alike; what is wrong is not timed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recsys import config
from recsys.scoring.prefill import CachedModel
from scripts import bench_serving
from scripts.bench_serving import Scoring
from scripts.step_variants import VARIANTS, Shape, variant_of

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "scripts" / "bench_step.config"
SMALL = [
    "model.embedding_dim=12",
    "model.ranker.mixer.hstu={num_layers: 2 num_heads: 3 qk_dim: 4}",
    "model.precision=FP32",
]
SHAPE = Shape(
    history=24,
    batch=2,
    candidates=7,
    window=5,
    prefix=2,
    tail=7,
    split_layer=1,
    backend="reference",
)
FLAGS = ["--history", "24", "--rows", "2", "--candidates", "7", "--window", "5", "--prefix", "2"]
FLAGS += ["--tail", "7", "--microbatch", "3", "--repeats", "2", "--commit", "abc"]
FLAGS += [part for override in SMALL for part in ("--set", override)]


def scoring(name="full", shape=SHAPE) -> Scoring:
    return Scoring(variant_of(config.load(BASE, SMALL), name, shape), 3, torch.device("cpu"))


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_all_ways_give_the_scores_of_one_pass(name):
    ways = scoring(name)
    assert [piece.num_candidates.tolist() for piece in ways.slices] == [[3, 3], [3, 3], [1, 1]]
    assert {piece.layout.num_uih.tolist()[0] for piece in ways.slices} == {24}
    expected = ways.one_pass()
    assert expected.shape == (14, 2) and expected.std(0).min() > 0.01
    torch.testing.assert_close(ways.uncached(), expected, rtol=1e-5, atol=1e-6)
    for way in (ways.cached, ways.pieces):
        torch.testing.assert_close(way(), expected, rtol=1e-5, atol=1e-6)
    assert bench_serving.difference_of(ways) <= 1e-6


@torch.no_grad()
def test_histories_count():
    """Else a cache of anything would do."""
    ways = scoring()
    expected = ways.one_pass()
    ways.batch.uih_actions.zero_()
    assert (ways.one_pass() - expected).abs().max() > 0.01


def test_variants_become_records(tmp_path, capsys):
    chosen = ["--variant", "full", "--variant", "channels semi-local truncation"]
    assert bench_serving.main([*FLAGS, *chosen, "--record", str(tmp_path / "new" / "record.json")]) == 0
    records = json.loads((tmp_path / "new" / "record.json").read_text())
    assert [record["variant"] for record in records] == chosen[1::2]
    for record in records:
        assert record["ok"] and record["commit"] == "abc" and record["difference"] <= 1e-5
        assert record["candidates_per_second"] == pytest.approx(14 / record["cached_in_a_row_ms"] * 1e3)
        assert min(record[way] for way in ("uncached_ms", "one_pass_ms", "prefill_ms", "ratio")) > 0
    # Contextual tokens and events of both rows: keys and values of 3 heads of width 4, in float32.
    assert records[0]["cache_mb"] * 2**20 == 2 * (2 + 24) * 2 * 2 * 12 * 4
    out = capsys.readouterr().out
    assert "cpu, reference, fp32, 2 layers of width 12, 2 rows of 24 events and 7 candidates, 3 at a" in out


def test_a_wrong_cache_is_not_timed(monkeypatch, tmp_path, capsys):
    right = CachedModel.score
    monkeypatch.setattr(CachedModel, "score", lambda *inputs: right(*inputs) + 1e-3)
    record = tmp_path / "r.json"
    assert bench_serving.main([*FLAGS, "--variant", "full", "--record", str(record)]) == 1
    (wrong,) = json.loads(record.read_text())
    assert not wrong["ok"] and wrong["cached_ms"] is None and wrong["ratio"] is None
    shown = capsys.readouterr()
    assert "full: " in shown.err and "times the allowed error" in shown.err and "FAILED" in shown.out


def test_a_difference_at_full_size_counts_too(monkeypatch, capsys):
    monkeypatch.setattr(bench_serving, "error_of", lambda *_: 0.0)
    monkeypatch.setattr(bench_serving, "difference_of", lambda _: 2e-5)
    assert bench_serving.main([*FLAGS, "--variant", "full"]) == 1
    assert "cached and uncached scores differ by 2.0e-05" in capsys.readouterr().err


def test_the_defaults_are_those_of_the_bar():
    options = bench_serving._options([])
    assert (options.history, options.candidates, options.microbatch) == (4096, 2048, 256)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "configs/ml_1m_hstu.config"], "has no ranker"),
        (["--set", "model.ranker.mixer={sasrec {}}"], "has no hstu"),
        (["--set", "features[2].id.multi_valued=true"], "candidate_item_id is multi-valued"),
    ],
)
def test_what_cannot_be_benched_is_said(monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(ROOT)
    flags = FLAGS[: FLAGS.index("--set")] if "--config" in arguments else FLAGS
    assert bench_serving.main([*flags, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_rows_need_not_divide_into_microbatches():
    whole = scoring(shape=replace(SHAPE, candidates=2))
    assert len(whole.slices) == 1 and whole.slices[0].num_candidates.tolist() == [2, 2]
