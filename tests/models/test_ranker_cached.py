"""Rankers with a cache against the same rankers without one, over every form of sequence."""

import dataclasses

import pytest
import torch

from recsys import protos as pb
from recsys.models import build_model
from recsys.models.cached import microbatches
from recsys.models.halves import Halves
from recsys.ops import SequenceLayout
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
START = contextual("positional { origin: START }")
FORMS = RANKERS | {
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


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_no_user_features_are_none():
    pipeline = pipeline_of(*FORMS["no user features"])
    assert not any(pb.USER in feature.sides for feature in pipeline.features)


@torch.no_grad()
def test_scores_are_those_of_whole_rows(model, pipeline):
    batch = batch_of(pipeline, random_rows(pipeline, SIZES))
    cache = model.prefill(batch)
    expected = model.score(batch)
    assert cache.batch_size == len(SIZES) and expected.shape == (17, len(model.tasks))
    close(model.score_cached(batch, cache), expected)


@torch.no_grad()
def test_users_alone_and_candidates_alone_are_enough(model, pipeline):
    rows = random_rows(pipeline, SIZES)
    expected = model.score(batch_of(pipeline, rows))
    no_candidates = batch_of(pipeline, [row.with_candidates([]) for row in rows])
    # Other histories and other users beside the candidates: nobody looks at them.
    others = random_rows(pipeline, [(n + 1, m) for n, m in SIZES], seed=5)
    asked = [
        other.changed(
            candidate_timestamps=row.candidate_timestamps,
            labels={},
            **{name: value for name, value in row.values.items() if name.startswith("candidate_")},
        )
        for other, row in zip(others, rows, strict=True)
    ]
    labels = {task.name: torch.zeros(17) for task in model.tasks}
    for row in asked:
        row.labels = {name: [0.0] * len(row.candidate_timestamps) for name in labels}
    close(model.score_cached(batch_of(pipeline, asked), model.prefill(no_candidates)), expected)


@torch.no_grad()
def test_microbatches(model, pipeline):
    batch = batch_of(pipeline, random_rows(pipeline, SIZES))
    cache, expected = model.prefill(batch), model.score(batch)
    for size in (1, 2, 3, 5, 100):
        close(model.score_in_microbatches(batch, cache, size), expected)


@torch.no_grad()
def test_odd_batches(model, pipeline):
    for sizes in ([(0, 0)], [(4, 0), (0, 0)], [(0, 1)], [(1, 1)], [(0, 3), (0, 2)]):
        batch = batch_of(pipeline, random_rows(pipeline, sizes))
        cache, expected = model.prefill(batch), model.score(batch)
        close(model.score_cached(batch, cache), expected)
        close(model.score_in_microbatches(batch, cache, 2), expected)


@torch.no_grad()
def test_selected_users(model, pipeline):
    rows, chosen = random_rows(pipeline, SIZES), [5, 2, 0, 2]
    cache = model.prefill(batch_of(pipeline, rows)).select(chosen).to("cpu")
    batch = batch_of(pipeline, [rows[row] for row in chosen])
    close(model.score_cached(batch, cache), model.score(batch))
    with pytest.raises(ValueError, match="the batch has 4 rows, the cache 2: select rows of it"):
        model.score_cached(batch, cache.select([1, 0]))


@torch.no_grad()
def test_no_module_keeps_anything(model, pipeline):
    batches = [batch_of(pipeline, random_rows(pipeline, SIZES, seed=seed)) for seed in (0, 1)]
    expected = [model.score(batch) for batch in batches]
    state = {
        (name, key): id(value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
    }
    caches = [model.prefill(batch) for batch in batches]
    for number in (1, 0, 1):
        close(model.score_cached(batches[number], caches[number]), expected[number])
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
    plain, cache = model.score(batch), model.prefill(batch)
    assert cache.mixer.stacks[0][0].keys[0].dtype == torch.bfloat16
    found = model.score_cached(batch, cache)
    assert (found - want).norm() <= 1.5 * (plain - want).norm() + 1e-3 * want.norm()


@torch.no_grad()
def test_what_cannot_be_cached_says_so():
    pipeline = pipeline_of(RANKER, "model { ranker { mixer { sasrec { num_heads: 2 } } } }")
    model, batch = build(pipeline), batch_of(pipeline, random_rows(pipeline, SIZES))
    with pytest.raises(ValueError, match="SasRecMixer keeps no cache; score whole rows"):
        model.prefill(batch)
    pipeline = pipeline_of(RANKER)
    model = build(pipeline).train()
    with pytest.raises(RuntimeError, match="evaluation mode"):
        model.prefill(batch)


def test_gradients_are_refused():
    pipeline = pipeline_of(RANKER)
    model, batch = build(pipeline), batch_of(pipeline, random_rows(pipeline, SIZES))
    with pytest.raises(RuntimeError, match=r"call it under torch.no_grad\(\)"):
        model.score_cached(batch, model.prefill(batch))


def test_slices_of_candidates():
    counts = [2, 0, 7, 3]
    layout = SequenceLayout(torch.tensor(counts), torch.tensor(counts))
    for joined in (layout, SequenceLayout.join([layout, layout])):
        for size, group_size, step in ((3, 1, 3), (1, 1, 1), (5, 2, 4), (1, 3, 3), (9, 1, 9)):
            seen = []
            for number, part in enumerate(microbatches(joined, size, group_size)):
                left = [min(max(n - number * step, 0), step) for n in counts]
                assert part.rows == [row for row, n in enumerate(left) if n]
                channels = part.targets.layout.parts or (part.targets.layout,)
                assert [one.lengths.tolist() for one in channels] == [[n for n in left if n]] * len(channels)
                assert part.targets.index[: len(part.places)].tolist() == part.places.tolist()
                seen += part.places.tolist()
            assert sorted(seen) == list(range(12))
    with pytest.raises(ValueError, match="size must be >= 1, got 0"):
        list(microbatches(layout, 0, 1))


def test_slices_of_equal_sizes_share_what_layers_work_out():
    counts = torch.tensor([6, 6])
    slices = list(microbatches(SequenceLayout(counts, counts), 2, 1))
    assert len({id(part.targets.layout) for part in slices}) == 1
    counts = torch.tensor([6, 5])
    slices = list(microbatches(SequenceLayout(counts, counts), 2, 1))
    assert len({id(part.targets.layout) for part in slices}) == 2


# What lets a cache grow: positions from the start, no ages, and a stack that allows it.
BLIND = HSTU.format("bias { num_time_buckets: 0 }  mask { contextual_reads_history: false }")
PLACED = contextual("positional { origin: START  num_time_buckets: 0 }")
GROWING = {
    "summed": (RANKER, PLACED, BLIND),
    "interleaved": (RANKER, PLACED, BLIND, INTERLEAVED),
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
    before = model.prefill(batch_of(pipeline, old))
    cache = model.extend(batch_of(pipeline, new), before)
    assert cache.prefix.lengths.tolist() == model.prefill(whole).prefix.lengths.tolist()
    close(model.score_cached(whole, cache), model.score(whole))
    assert cache.num_bytes > before.num_bytes


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
        model.extend(batch, model.prefill(batch))


@torch.no_grad()
def test_a_half_looks_up_nothing_of_the_other():
    pipeline = pipeline_of(*RANKERS["channels"])
    model, halves = build(pipeline), Halves(pipeline)
    batch = batch_of(pipeline, random_rows(pipeline, SIZES))
    counts = {name: len(found) for name, found in model.embed(batch).items()}
    for half, kept in (
        (halves.users(batch), lambda name: not name.startswith("candidate_")),
        (halves.candidates(batch), lambda name: name.startswith("candidate_")),
        (halves.events(batch), lambda name: name.startswith("uih_")),
    ):
        found = {name: len(vectors) for name, vectors in model.embed(half).items()}
        assert found == {name: count if kept(name) else 0 for name, count in counts.items()}
        assert half.ids.stride() == len(SIZES)
    # Half of a half is itself.
    again = halves.users(halves.users(batch))
    assert again.layout.lengths.tolist() == halves.users(batch).layout.lengths.tolist()
    assert dataclasses.replace(again).channel_layout.total_targets == 0
