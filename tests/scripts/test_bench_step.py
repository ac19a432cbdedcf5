"""The benchmark of training steps at tiny sizes: variants are what they say; what is wrong is not timed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recsys import config
from recsys import protos as pb
from scripts import bench_step
from scripts.bench_step import Runner
from scripts.step_variants import VARIANTS, Shape, variant_of

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "scripts" / "bench_step.config"
WIDTH, HEADS, DIM, LAYERS, CONTEXTUAL = 12, 3, 4, 4, 2
SMALL = [
    f"model.embedding_dim={WIDTH}",
    f"model.ranker.mixer.hstu={{num_layers: {LAYERS} num_heads: {HEADS} qk_dim: {DIM}}}",
]
SHAPE = Shape(
    history=24,
    batch=2,
    candidates=3,
    window=5,
    prefix=2,
    tail=7,
    split_layer=1,
    backend="reference",
)
FLAGS = ["--history", "24", "--batch", "2", "--candidates", "3", "--window", "5", "--prefix", "2"]
FLAGS += ["--tail", "7", "--repeats", "2", "--commit", "abc"]
FLAGS += [part for override in SMALL for part in ("--set", override)]


def base():
    return config.load(BASE, SMALL)


def pairs(history, window=None, prefix=0, kept=None):
    """Visible pairs of a row, counted one by one; only the newest `kept` events look."""
    kinds = [0] * CONTEXTUAL + [1] * history + [2] * SHAPE.candidates
    older = 0 if kept is None else history - kept
    actual = 0
    for i, query in enumerate(kinds):
        if CONTEXTUAL <= i < CONTEXTUAL + older:
            continue
        for j, key in enumerate(kinds):
            if key == 0:
                actual += 1
            elif key == 1 and query == 1:
                inside = window is None or i - j < window or j - CONTEXTUAL < prefix
                actual += j <= i and inside
            elif key == 1:
                actual += 1
            else:
                actual += i == j
    return actual


def layer_flop(history, window=None, prefix=0, kept=None):
    """Forward FLOP of one layer for a row: uvqk, output projection of [u, a, u * norm(a)], attention.

    Behind it go on the newest `kept` events: the others need keys and values alone.
    """
    older = 0 if kept is None else history - kept
    tokens = CONTEXTUAL + history - older + SHAPE.candidates
    inner = HEADS * DIM
    weights = WIDTH * 4 * inner + 3 * inner * WIDTH
    products = tokens * weights + older * WIDTH * 2 * inner
    return 2 * products + 2 * pairs(history, window, prefix, kept) * 2 * inner


def flop(name):
    return Runner(variant_of(base(), name, SHAPE), torch.device("cpu")).flop


def test_useful_flop_are_those_of_a_count_by_hand():
    rows = SHAPE.batch
    full, semi, short = layer_flop(24), layer_flop(24, 5, 2), layer_flop(7)
    measured = {name: flop(name) for name in VARIANTS if "channels" not in name}
    assert measured["full"] - measured["semi-local"] == 3 * rows * LAYERS * (full - semi)
    behind = LAYERS - SHAPE.split_layer
    saved = full - layer_flop(24, kept=7) + behind * (full - short)
    assert measured["full"] - measured["truncation"] == 3 * rows * saved
    saved = full - layer_flop(24, 5, 2, kept=7) + behind * (full - layer_flop(7, 5, 2))
    assert measured["full"] - measured["semi-local truncation"] == 3 * rows * saved


def test_all_rows_are_as_long_as_asked_and_channels_hold_half_of_the_events_each():
    shape = replace(SHAPE, history=400)
    pipeline = variant_of(base(), "channels", shape)
    for batch in bench_step.batches_of(pipeline, torch.device("cpu")):
        assert batch.uih_lengths.tolist() == [400, 400] and batch.num_candidates.tolist() == [3, 3]
        lengths = torch.stack(list(batch.channel_lengths.values()))
        assert lengths.shape == (2, 2) and (lengths - 200).abs().max() < 5 * 10


def test_layers_and_width_are_the_same_in_all_variants():
    for name in VARIANTS:
        mixer = variant_of(base(), name, SHAPE).model.ranker.mixer
        stacks = [item.hstu for item in mixer.mixture.stacks] or [mixer.hstu]
        assert len(stacks) == (2 if "channels" in name else 1)
        for stack in stacks:
            assert sum(group.num_layers for group in stack.layer_groups) == LAYERS
            assert [group.tail_len for group in stack.layer_groups] == ([0, 7] if "trunc" in name else [0])
            windows = {group.mask.window for group in stack.layer_groups}
            assert windows == ({5} if "semi" in name else {0}) and stack.num_heads == HEADS


def test_every_variant_becomes_a_record(tmp_path, capsys):
    assert bench_step.main([*FLAGS, "--record", str(tmp_path / "new" / "record.json")]) == 0
    records = json.loads((tmp_path / "new" / "record.json").read_text())
    assert [entry["variant"] for entry in records] == list(VARIANTS)
    for entry in records:
        assert entry["ok"] and entry["commit"] == "abc" and entry["num_layers"] == LAYERS
        assert entry["tflops"] == pytest.approx(entry["useful_gflop"] / entry["ms"])
    assert records[0]["speedup"] == 1 and records[0]["tokens"] == 2 * (CONTEXTUAL + 24 + 3)
    lines = capsys.readouterr().out.splitlines()
    assert [line[:30].strip() for line in lines[2:]] == list(VARIANTS) and "reference" in lines[0]


def test_a_variant_that_is_wrong_is_not_timed(monkeypatch, tmp_path, capsys):
    right, calls = bench_step.loss_and_gradients, []

    def off(model, batch):
        calls.append(model)
        actual = right(model, batch)
        return [part * 1.1 for part in actual] if len(calls) == 1 else actual

    monkeypatch.setattr(bench_step, "loss_and_gradients", off)
    chosen = ["--variant", "semi-local", "--variant", "truncation", "--record", str(tmp_path / "r.json")]
    assert bench_step.main([*FLAGS, *chosen]) == 1
    wrong, fine = json.loads((tmp_path / "r.json").read_text())
    assert not wrong["ok"] and wrong["ms"] is None and wrong["speedup"] is None
    assert fine["ok"] and fine["ms"] > 0
    captured = capsys.readouterr()
    assert "semi-local: " in captured.err and "times the allowed error" in captured.err
    assert "FAILED" in captured.out


@pytest.mark.parametrize("name", ["quickstart", "kuairand_ultra_hstu", "ml_1m_ranking"])
def test_a_ready_config_is_benched_without_its_data(name):
    loaded = config.load(ROOT / "configs" / f"{name}.config")
    for variant in VARIANTS:
        pipeline = variant_of(loaded, variant, SHAPE)
        assert pipeline.model.embedding_dim == loaded.model.embedding_dim
    assert bench_step.error_of(loaded, "channels semi-local truncation", SHAPE, torch.device("cpu")) <= 1


def test_an_error_of_numbers_that_are_not_finite_is_infinite(monkeypatch):
    monkeypatch.setattr(bench_step, "loss_and_gradients", lambda model, batch: [torch.tensor([float("nan")])])
    assert bench_step.error_of(base(), "full", SHAPE, torch.device("cpu")) == float("inf")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "configs/ml_1m_hstu.config"], "has no ranker"),
        (["--set", "model.ranker.mixer={sasrec {}}"], "has no hstu"),
        (["--variant", "truncation", "--split-layer", "4"], "--split-layer 4: it must be from 1 to 3"),
        (["--config", "no.config"], "no such file"),
    ],
)
def test_what_cannot_be_benched_is_said(monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(ROOT)
    flags = FLAGS[: FLAGS.index("--set")] if "--config" in arguments else FLAGS
    assert bench_step.main([*flags, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_default_is_what_the_bar_asks_for():
    pipeline = variant_of(config.load(BASE), "full", replace(SHAPE, history=8192))
    stack = pipeline.model.ranker.mixer.hstu
    assert (pipeline.model.embedding_dim, stack.num_heads, stack.qk_dim, stack.v_dim) == (256, 4, 64, 64)
    assert pipeline.model.precision == pb.BF16 and stack.layer_groups[0].num_layers == 6
