"""Pieces on tensors that stay in place, recorded or not, against scoring whole rows."""

import gc
import weakref

import pytest
import torch

from recsys.modules.mixers import HstuMixer
from recsys.modules.stu import STULayer
from recsys.scoring import graph_prefill
from recsys.scoring.graph_scoring import WARM_UP, GraphScoring
from tests.models.test_no_host_sync import batch_on, name_backend, no_waiting
from tests.models.test_ranker_cached import FORMS, SIZES, build, close
from tests.modules.pipelines import batch_of, pipeline_of, random_rows


class Recorded:
    """Stands where a CUDA graph would: the same kernels again, and one output that is overwritten."""

    count = 0

    def __init__(self, run):
        self.run, self.output = run, run().clone()
        Recorded.count += 1

    def __call__(self):
        return self.output.copy_(self.run())


@pytest.fixture(params=FORMS, scope="module")
def pipeline(request):
    return pipeline_of(*FORMS[request.param])


@torch.no_grad()
def check(scoring, batches, expected):
    for batch, want in zip(batches, expected, strict=True):
        close(scoring.score(batch, scoring.prefill(batch)), want)


MANY = [
    SIZES,
    [(6, 4), (0, 3), (5, 7), (1, 1), (2, 0), (4, 9), (3, 5)],  # as many rows
    [(0, 2), (0, 0), (3, 8), (6, 6), (1, 1), (0, 1), (0, 0)],  # a smaller cache, old events behind it
    [(1, 5), (2, 5)],
    [(6, 4)],
    [(0, 0)],
    [(2, 4), (0, 4), (5, 4)],  # whole pieces
    [(3, 0), (2, 0)],
    SIZES,
]


@pytest.mark.parametrize("size", [2, 100])
@torch.no_grad()
def test_scores_are_those_of_whole_rows(pipeline, size):
    model = build(pipeline)
    batches = [batch_of(pipeline, random_rows(pipeline, sizes, seed)) for seed, sizes in enumerate(MANY)]
    expected = [model.score(batch) for batch in batches]
    Recorded.count = 0
    scoring = GraphScoring(model, size, record=Recorded, record_prefill=True)
    for _ in range(2):  # forms are recorded on the way, and forms of other batches used again
        check(scoring, batches, expected)
    assert Recorded.count > 0
    check(GraphScoring(model, size), batches, expected)


@torch.no_grad()
def test_layers_of_ops_fill_the_cache_where_it_lies(pipeline, monkeypatch):
    model = build(pipeline)
    batches = [batch_of(pipeline, random_rows(pipeline, sizes, seed)) for seed, sizes in enumerate(MANY[:3])]
    expected = [model.score(batch) for batch in batches]
    monkeypatch.setattr(STULayer, "fused", True)
    scoring = GraphScoring(model, 2, record=Recorded)
    for _ in range(2):
        check(scoring, batches, expected)
    kept, cache = scoring.prefill(batches[0]), model.prefill(batches[0])
    own = [stage.keys + stage.values for stack in kept.mixer.stacks for stage in stack]
    new = [stage.keys + stage.values for stack in cache.mixer.stacks for stage in stack]
    places = {buffer.untyped_storage().data_ptr() for buffer in scoring.room._buffers}
    for ours, theirs in zip(sum(own, ()), sum(new, ()), strict=True):
        assert ours.untyped_storage().data_ptr() in places
        assert theirs.untyped_storage().nbytes() == theirs.nbytes
        close(ours, theirs)


@pytest.mark.parametrize("fused", [False, True])
@torch.no_grad()
def test_a_recorded_prefill_leaves_the_same_cache(pipeline, fused, monkeypatch):
    monkeypatch.setattr(STULayer, "fused", fused)
    model = build(pipeline)
    scoring = GraphScoring(model, 2, record=Recorded, record_prefill=True)
    old = batch_of(pipeline, random_rows(pipeline, SIZES))
    for _ in range(WARM_UP + 1):
        scoring.prefill(old)
    recordable = isinstance(model.mix, HstuMixer) and all(rule.tail_len is None for rule in model.mix.rules)
    assert scoring.num_graphs == int(recordable)
    for seed, sizes in enumerate([SIZES, [(events, 1) for events, _ in reversed(SIZES)], SIZES]):
        batch = batch_of(pipeline, random_rows(pipeline, sizes, seed))
        found, expected = scoring.prefill(batch), model.prefill(batch)
        stages = [[stage for stack in cache.mixer.stacks for stage in stack] for cache in (found, expected)]
        for one, other in zip(*stages, strict=True):
            assert torch.equal(one.layout.lengths, other.layout.lengths)
            for ours, theirs in zip(one.tensors, other.tensors, strict=True):
                close(ours, theirs)
        close(scoring.score(batch, found), model.score(batch))


@torch.no_grad()
def test_a_prefill_without_room_is_not_recorded(monkeypatch):
    pipeline = pipeline_of(*FORMS["plain"])
    model, batch = build(pipeline), batch_of(pipeline, random_rows(pipeline, SIZES))
    monkeypatch.setattr(graph_prefill, "_fits", lambda *_: False)
    scoring = GraphScoring(model, 2, record=Recorded)
    for _ in range(WARM_UP + 2):
        cache = scoring.prefill(batch)
    assert scoring.num_graphs == 0
    close(scoring.score(batch, cache), model.score(batch))


@torch.no_grad()
def test_weights_may_change():
    pipeline = pipeline_of(*FORMS["plain"], "model { precision: BF16 }")
    model, batch = build(pipeline), batch_of(pipeline, random_rows(pipeline, SIZES))
    scoring = GraphScoring(model, 2, record=Recorded, record_prefill=True)
    before = [scoring.score(batch, scoring.prefill(batch)) for _ in range(WARM_UP + 1)][-1]
    for parameter in model.parameters():
        parameter.mul_(0.5)
    after = scoring.score(batch, scoring.prefill(batch))
    assert (after - before).abs().max() > 0.01
    expected = model.score_in_microbatches(batch, model.prefill(batch), 2)
    torch.testing.assert_close(after, expected, rtol=0.02, atol=0.02)


@torch.no_grad()
def test_a_cache_from_elsewhere_is_copied():
    pipeline = pipeline_of(*FORMS["channels"])
    model = build(pipeline)
    batches = [batch_of(pipeline, random_rows(pipeline, SIZES, seed)) for seed in (0, 1)]
    caches, expected = [model.prefill(batch) for batch in batches], [model.score(batch) for batch in batches]
    scoring = GraphScoring(model, 2, record=Recorded)
    for number in (0, 1, 1, 0):
        close(scoring.score(batches[number], caches[number]), expected[number])


@torch.no_grad()
def test_a_cache_whose_place_is_taken_is_refused():
    pipeline = pipeline_of(*FORMS["plain"])
    model, batch = build(pipeline), batch_of(pipeline, random_rows(pipeline, SIZES))
    scoring = GraphScoring(model, 2)
    old = scoring.prefill(batch)
    kept = old.select(range(old.batch_size))
    scoring.prefill(batch_of(pipeline, random_rows(pipeline, SIZES, seed=1)))
    with pytest.raises(ValueError, match="a later prefill has taken the place of this cache"):
        scoring.score(batch, old)
    close(scoring.score(batch, kept), model.score(batch))


@torch.no_grad()
def test_a_form_that_is_dropped_is_gone():
    """Not only once garbage is collected: that must not destroy graphs while another one is recorded."""
    pipeline = pipeline_of(*FORMS["plain"])
    model = build(pipeline)
    batches = [batch_of(pipeline, random_rows(pipeline, sizes)) for sizes in ([(2, 4)] * 2, [(3, 4)] * 40)]

    def recorded(run):  # like a graph it knows its output, not what made it
        output = run()
        return lambda: output

    scoring = GraphScoring(model, 2, record=recorded, record_prefill=True)
    gc.collect()
    gc.disable()
    try:
        for _ in range(WARM_UP + 1):
            scoring.score(batches[0], scoring.prefill(batches[0]))
        forms = [weakref.ref(form) for form in (*scoring._forms.values(), *scoring._prefill._forms.values())]
        assert scoring.num_graphs == 3
        for _ in range(2):  # more room: older forms are void
            scoring.score(batches[1], scoring.prefill(batches[1]))
        assert [form() for form in forms] == [None, None]
    finally:
        gc.enable()


def test_size_is_checked():
    with pytest.raises(ValueError, match="size must be >= 1, got 0"):
        GraphScoring(build(pipeline_of(*FORMS["plain"])), 0)


@pytest.mark.gpu
@pytest.mark.parametrize("record_prefill", [False, True])
@pytest.mark.parametrize("name", FORMS)
@torch.no_grad()
def test_graphs_on_cuda(name, record_prefill):
    pipeline = pipeline_of(*FORMS[name])
    name_backend(pipeline, "triton")
    model = build(pipeline).to("cuda")
    batches = [
        batch_of(pipeline, random_rows(pipeline, sizes, seed)).to(torch.device("cuda"))
        for seed, sizes in enumerate(MANY)
    ]
    expected = [model.score(batch) for batch in batches]
    scoring = GraphScoring(model, 2, record_prefill=record_prefill)
    for _ in range(3):
        check(scoring, batches, expected)
    assert scoring.num_graphs > 0
    for parameter in model.parameters():
        parameter.mul_(0.5)
    check(scoring, batches, [model.score(batch) for batch in batches])


@pytest.mark.gpu
@pytest.mark.parametrize("record_prefill", [False, True])
@pytest.mark.parametrize("name", ["plain", "channels", "truncated"])
@torch.no_grad()
def test_nothing_waits_for_the_device(name, record_prefill):
    pipeline = pipeline_of(*FORMS[name])
    name_backend(pipeline, "triton")
    model = build(pipeline).to("cuda")
    batches = [batch_on(pipeline, "cuda", seed) for seed in (0, 1)]
    scoring = GraphScoring(model, 2, record_prefill=record_prefill)
    for _ in range(3):
        check(scoring, batches, [model.score(batch) for batch in batches])
    with no_waiting():
        found = [scoring.score(batch, scoring.prefill(batch)) for batch in batches]
    for batch, scores in zip(batches, found, strict=True):
        close(scores, model.score(batch))
