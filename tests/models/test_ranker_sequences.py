"""Rankers with every form of sequence, encoder and mixer: what holds for all of them."""

import pytest
import torch

from recsys.models import build_model
from tests.modules.pipelines import (
    RANKER,
    RANKERS,
    batch_of,
    contextual,
    pipeline_of,
    random_row,
    random_rows,
)

SIZES = [(3, 2), (0, 1), (6, 4), (2, 0), (1, 3)]
SASREC = "model { ranker { mixer { sasrec { num_heads: 2 } } } }"
ROTARY = "model { ranker { mixer { sasrec { num_heads: 2  rotary {} } } } }"
TIMED = RANKERS | {"rotary": (RANKER, ROTARY)}
FORMS = TIMED | {"sasrec": (RANKER, SASREC)}


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


def logits(model, pipeline, rows):
    return model(batch_of(pipeline, rows)).logits


def test_a_row_is_scored_alike_alone_and_in_a_batch(model, pipeline):
    rows = random_rows(pipeline, SIZES)
    together = logits(model, pipeline, rows).split([n for _, n in SIZES])
    for row, expected in zip(rows, together, strict=True):
        torch.testing.assert_close(logits(model, pipeline, [row]), expected, rtol=1e-4, atol=1e-5)


def test_a_candidate_is_scored_alike_among_any_others(model, pipeline):
    row = random_row(pipeline, 5, 4)
    scores = logits(model, pipeline, [row])
    for keep in ([3, 1, 0, 2], [2], [1, 3]):
        actual = logits(model, pipeline, [row.with_candidates(keep)])
        torch.testing.assert_close(actual, scores[keep], rtol=1e-4, atol=1e-5)


def test_labels_do_not_reach_the_scores(model, pipeline):
    rows = random_rows(pipeline, SIZES)
    flipped = [row.changed(labels={k: [1 - x for x in v] for k, v in row.labels.items()}) for row in rows]
    assert torch.equal(logits(model, pipeline, rows), logits(model, pipeline, flipped))


@pytest.mark.parametrize("pipeline", TIMED, indirect=True)  # others do not look at times of candidates
@pytest.mark.parametrize(
    "change",
    [
        {"uih_actions": [0, 9, 0, 0, 0]},
        {"uih_watch_time": [0.0, 0.0, 0.0, 0.0, 99.0]},
        {"uih_item_id": [1, 2, 3, 4, 5]},
        {"gender": 1},
        {"age": 3.0},
        {"uih_timestamps": [1, 2, 3, 4, 5]},
        {"candidate_timestamps": [1_700_000_000]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_input_reaches_the_scores(model, pipeline, change):
    row = random_row(pipeline, 5, 1, seed=3).changed(gender=2, uih_actions=[1] * 5, uih_watch_time=[5.0] * 5)
    actual = logits(model, pipeline, [row.changed(**change)])
    assert (actual - logits(model, pipeline, [row])).norm() > 1e-5


def test_placements_differ():
    scores = []
    for change in ("action_placement: SUMMED", "action_placement: INTERLEAVED"):
        # One length for both, so that all parameters are equal.
        pipeline = pipeline_of(RANKERS["plain"][0], contextual(change), "model { max_seq_len: 18 }")
        scores.append(logits(build(pipeline), pipeline, random_rows(pipeline, SIZES)))
    assert (scores[0] - scores[1]).abs().max() > 1e-3


def test_flops_grow_with_what_is_computed():
    def flops(name):
        pipeline = pipeline_of(*RANKERS[name])
        return build(pipeline).flops(batch_of(pipeline, random_rows(pipeline, SIZES)))

    plain = flops("plain")
    assert flops("slice") < plain < flops("interleaved")
    assert plain < flops("concatenated actions") < flops("contextualized")
