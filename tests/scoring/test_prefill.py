"""Models with a cache against the same models without one, over every form of sequence."""

import dataclasses

import pytest
import torch

from recsys import protos as pb
from recsys.models.components import build_model
from recsys.modules.mixers import LinearMixer
from recsys.scoring.prefill import CachedModel, keeps_cache
from recsys.scoring.scorer import EagerModel, Scorer
from recsys.scoring.user_candidate_split import UserCandidateSplit
from tests.modules.pipelines import (
    CHANNELS,
    RANKER,
    RANKERS,
    batch_of,
    contextual,
    pipeline_of,
    random_rows,
)

SIZES = [(3, 2), (0, 1), (6, 7), (2, 0), (0, 0), (1, 3), (5, 4)]
HSTU = "model {{ ranker {{ mixer {{ hstu {{ {} }} }} }} }}"
TRUNCATED = HSTU.format(
    """layer_groups { num_layers: 1  mask { window: 2  prefix: 1  unit: EVENTS } }
    layer_groups { num_layers: 2  tail_len: 2  tail_unit: EVENTS  mask { target_group_size: 2 } }
    layer_groups {
      num_layers: 1  tail_len: 2  mask { target_window: true  window: 1  target_group_size: 3 }
    }"""
)
INTERLEAVED = contextual("action_placement: INTERLEAVED")
LINEAR = "model { ranker { mixer { linear { num_heads: 2  qk_dim: 4 } } } }"
HYBRID = """model { ranker { mixer { hybrid {
  mixers { hstu { num_heads: 2  qk_dim: 4  layer_groups { num_layers: 1  tail_len: 3 } } }
  mixers { linear { num_heads: 2  qk_dim: 4  form: DELTA } }
  mixers { sasrec { num_layers: 1  num_heads: 2 } } } } } }"""
START = contextual("positional { origin: START }")
SASREC = "model {{ ranker {{ mixer {{ sasrec {{ num_heads: 2  {} }} }} }} }}"
GROUPS = """layer_groups { num_layers: 1  mask { window: 2  prefix: 1  unit: EVENTS } }
  layer_groups { num_layers: 2  tail_len: 2  mask { target_group_size: 2 } }"""
FORMS = RANKERS | {
    "sasrec": (RANKER, SASREC.format(f"ligr: true  {GROUPS}")),
    "rotary": (RANKER, SASREC.format(f"rotary {{}}  {GROUPS}")),
    "hybrid": (RANKER, HYBRID),
    "truncated": (RANKER, TRUNCATED),
    "truncated, interleaved": (RANKER, TRUNCATED, INTERLEAVED),
    "positions from the start": (RANKER, START),
    "positions from the start, channels": (RANKER, CHANNELS, START),
    "no positions": tuple(text.replace("positional { num_time_buckets: 5 }", "") for text in (RANKER,)),
    "no user features": (
        RANKER.replace('features { name: "gender"  sides: USER  id { vocabulary { size: 3 }', "").replace(
            '  embedding_dim: 4 } }\nfeatures { name: "age"  sides: USER  numeric { normalize {} } }', ""
        ),
    ),
}


def build(pipeline):
    torch.manual_seed(3)
    model = build_model(pipeline).eval()
    for name, parameter in model.named_parameters():
        if not name.startswith("embed"):
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture(params=FORMS, scope="module")
def pipeline(request):
    return pipeline_of(*FORMS[request.param])


@pytest.fixture(scope="module")
def model(pipeline):
    return build(pipeline)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def in_pieces(model, batch, cache, size):
    scorer = Scorer(EagerModel(model), model.pipeline, cached_piece=size)
    return scorer.score_cached(batch, cache).scores()


def test_no_user_features_are_none():
    pipeline = pipeline_of(*FORMS["no user features"])
    assert not any(pb.USER in feature.sides for feature in pipeline.features)


@torch.no_grad()
def test_scores_are_those_of_whole_rows(model, pipeline):
    batch = batch_of(pipeline, random_rows(pipeline, SIZES))
    cache = CachedModel(model).prefill(batch)
    expected = model.score(batch)
    assert cache.batch_size == len(SIZES) and expected.shape == (17, len(model.tasks))
    close(CachedModel(model).score(batch, cache), expected)


@torch.no_grad()
def test_users_alone_and_candidates_alone_are_enough(model, pipeline):
    rows = random_rows(pipeline, SIZES)
    expected = model.score(batch_of(pipeline, rows))
    no_candidates = batch_of(pipeline, [row.with_candidates([]) for row in rows])
    # Other histories and other users beside the candidates: nobody looks at them.
    others = random_rows(pipeline, [(n + 1, m) for n, m in SIZES], seed=5)
    asked = [
        neighbor.changed(
            candidate_timestamps=row.candidate_timestamps,
            labels={},
            **{name: value for name, value in row.values.items() if name.startswith("candidate_")},
        )
        for neighbor, row in zip(others, rows, strict=True)
    ]
    labels = {task.name: torch.zeros(17) for task in model.tasks}
    for row in asked:
        row.labels = {name: [0.0] * len(row.candidate_timestamps) for name in labels}
    close(
        CachedModel(model).score(batch_of(pipeline, asked), CachedModel(model).prefill(no_candidates)),
        expected,
    )


@torch.no_grad()
def test_microbatches(model, pipeline):
    batch = batch_of(pipeline, random_rows(pipeline, SIZES))
    cache, expected = CachedModel(model).prefill(batch), model.score(batch)
    for size in (3, 100):
        close(in_pieces(model, batch, cache, size), expected)


@torch.no_grad()
def test_odd_batches(model, pipeline):
    for sizes in ([(0, 0)], [(4, 0), (0, 0)], [(0, 1)], [(1, 1)], [(0, 3), (0, 2)]):
        batch = batch_of(pipeline, random_rows(pipeline, sizes))
        cache, expected = CachedModel(model).prefill(batch), model.score(batch)
        close(CachedModel(model).score(batch, cache), expected)
        if len(expected) != 1:  # a piece, which is the batch
            close(in_pieces(model, batch, cache, 1), expected)


@torch.no_grad()
def test_selected_users(model, pipeline):
    rows, chosen = random_rows(pipeline, SIZES), [5, 2, 0, 2]
    cache = CachedModel(model).prefill(batch_of(pipeline, rows)).select(chosen).to("cpu")
    batch = batch_of(pipeline, [rows[row] for row in chosen])
    close(CachedModel(model).score(batch, cache), model.score(batch))
    with pytest.raises(ValueError, match="the batch has 4 rows, the cache 2: select rows of it"):
        CachedModel(model).score(batch, cache.select([1, 0]))


@torch.no_grad()
def test_no_module_keeps_anything(model, pipeline):
    batches = [batch_of(pipeline, random_rows(pipeline, SIZES, seed=seed)) for seed in (0, 1)]
    expected = [model.score(batch) for batch in batches]
    state = {
        (name, key): id(value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
    }
    caches = [CachedModel(model).prefill(batch) for batch in batches]
    for number in (1, 0, 1):
        close(CachedModel(model).score(batches[number], caches[number]), expected[number])
    assert state == {
        (name, key): id(value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
    }


@torch.no_grad()
def test_bfloat16_is_as_far_off_as_without_a_cache():
    exact, rounded = (
        pipeline_of(RANKER, TRUNCATED, *change) for change in ((), ("model { precision: BF16 }",))
    )
    rows = random_rows(exact, SIZES)
    want = build(exact).score(batch_of(exact, rows))
    model, batch = build(rounded), batch_of(rounded, rows)
    plain, cache = model.score(batch), CachedModel(model).prefill(batch)
    assert cache.mixer.stacks[0][0].keys[0].dtype == torch.bfloat16
    actual = CachedModel(model).score(batch, cache)
    assert (actual - want).norm() <= 1.5 * (plain - want).norm() + 1e-3 * want.norm()


@torch.no_grad()
def test_what_cannot_be_cached_says_so(monkeypatch):
    pipeline = pipeline_of(RANKER, LINEAR)
    monkeypatch.setattr(LinearMixer, "keeps_cache", False)
    model, batch = build(pipeline), batch_of(pipeline, random_rows(pipeline, SIZES))
    assert not keeps_cache(model)
    with pytest.raises(ValueError, match="LinearMixer cannot score with a cache; score whole rows"):
        CachedModel(model)
    pipeline = pipeline_of(RANKER)
    model = build(pipeline).train()
    with pytest.raises(RuntimeError, match="evaluation mode"):
        CachedModel(model).prefill(batch)


def test_gradients_are_refused():
    pipeline = pipeline_of(RANKER)
    model, batch = build(pipeline), batch_of(pipeline, random_rows(pipeline, SIZES))
    with pytest.raises(RuntimeError, match=r"call it under torch.no_grad\(\)"):
        CachedModel(model).score(batch, CachedModel(model).prefill(batch))


# What lets a cache grow: positions from the start, no ages, and a stack that allows it.
BLIND = HSTU.format("bias { num_time_buckets: 0 }  mask { contextual_reads_history: false }")
PLACED = contextual("positional { origin: START  num_time_buckets: 0 }")
HIDDEN = "mask { contextual_reads_history: false }"
GROWING = {
    "summed": (RANKER, PLACED, BLIND),
    "interleaved": (RANKER, PLACED, BLIND, INTERLEAVED),
    "sasrec": (RANKER, PLACED, SASREC.format("mask { contextual_reads_history: false }")),
    "rotary": (RANKER, PLACED, SASREC.format(f"rotary {{ longest_seconds: 0 }}  {HIDDEN}")),
    "linear": (RANKER, PLACED, LINEAR.replace("qk_dim: 4", "qk_dim: 4  time_channel: false")),
    "all encoders": (*RANKERS["all"], PLACED, BLIND),
    "no positions": (*FORMS["no positions"], BLIND),
    "channels": (
        RANKER,
        PLACED,
        CHANNELS.replace("max_events: 4", "")
        .replace("scale_len: 3", "scale_len: 3  mask { contextual_reads_history: false }")
        .replace("bias { num_time_buckets: 40 }", "bias { num_time_buckets: 0 }")
        .replace("num_layers: 1 }", "num_layers: 1  mask { contextual_reads_history: false } }"),
    ),
}


@pytest.mark.parametrize("form", GROWING)
@torch.no_grad()
def test_a_cache_grows_with_the_history(form):
    pipeline = pipeline_of(*GROWING[form])
    model, rows = build(pipeline), random_rows(pipeline, SIZES)
    old, new = [], []
    for row, added in zip(rows, [1, 0, 3, 2, 0, 1, 4], strict=True):
        events = range(len(row.uih_timestamps))
        split = len(events) - added
        old.append(row.with_events(events[:split]).changed(request_time=row.request_time - 10**6))
        new.append(row.with_events(events[split:]))
    whole = batch_of(pipeline, rows)
    before = CachedModel(model).prefill(batch_of(pipeline, old))
    cache = CachedModel(model).extend(batch_of(pipeline, new), before)
    assert cache.prefix.lengths.tolist() == CachedModel(model).prefill(whole).prefix.lengths.tolist()
    close(CachedModel(model).score(whole, cache), model.score(whole))
    assert cache.num_bytes > before.num_bytes or form == "linear"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ((BLIND,), "positional.origin: END"),
        ((BLIND, START), "positional.num_time_buckets > 0"),
        ((PLACED,), "bias.num_time_buckets > 0"),
        ((PLACED, BLIND, HSTU.format("mask { contextual_reads_history: true }")), "contextual tokens read"),
    ],
)
@torch.no_grad()
def test_what_would_change_old_tokens_is_named(changes, message):
    pipeline = pipeline_of(RANKER, *changes)
    model, batch = build(pipeline), batch_of(pipeline, random_rows(pipeline, SIZES))
    with pytest.raises(ValueError, match=message):
        CachedModel(model).extend(batch, CachedModel(model).prefill(batch))


@torch.no_grad()
def test_a_side_looks_up_nothing_of_the_other():
    pipeline = pipeline_of(*RANKERS["channels"])
    model, split = build(pipeline), UserCandidateSplit(pipeline)
    batch = batch_of(pipeline, random_rows(pipeline, SIZES))
    counts = {name: len(actual) for name, actual in model.embed(batch).items()}
    for side, kept in (
        (split.users(batch), lambda name: not name.startswith("candidate_")),
        (split.candidates(batch), lambda name: name.startswith("candidate_")),
        (split.events(batch), lambda name: name.startswith("uih_")),
    ):
        actual = {name: len(vectors) for name, vectors in model.embed(side).items()}
        assert actual == {name: count if kept(name) else 0 for name, count in counts.items()}
        assert side.ids.stride() == len(SIZES)
    # Splitting again changes nothing.
    again = split.users(split.users(batch))
    assert again.layout.lengths.tolist() == split.users(batch).layout.lengths.tolist()
    assert dataclasses.replace(again).channel_layout.total_targets == 0
