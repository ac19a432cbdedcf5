import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import normalize

from recsys.models import Retriever, build_model
from recsys.models.next_item import last_of_each
from recsys.models.retriever import RetrieverOutputs
from recsys.training.evaluator import evaluate
from tests.modules.pipelines import (
    RETRIEVER,
    TWO_TOWER,
    batch_of,
    catalogue_item,
    pipeline_of,
    random_row,
    random_rows,
    with_another_future,
)

SIZES = [(3, 1), (0, 1), (6, 2), (2, 0), (1, 1)]
SASREC = "model { retriever { mixer { sasrec { num_heads: 2 } } } }"
ROTARY = "model { retriever { mixer { sasrec { num_heads: 2  rotary {} } } } }"
UNIFORM = "model { retriever { loss { softmax { uniform { num_negatives: 5 } } } } }"
IN_BATCH = "model { retriever { loss { softmax { in_batch { num_uniform: 5 } } } } }"
LEARNED = "model { retriever { loss { softmax { learn_temperature: true } } } }"
NEGATIVES = [5, 9, 7, 7, 20]


@pytest.fixture(params=["", SASREC, ROTARY], ids=["hstu", "sasrec", "rotary"])
def pipeline(request):
    return pipeline_of(RETRIEVER, request.param)


def build(pipeline):
    built = build_model(pipeline).eval()
    for name, parameter in built.named_parameters():
        if not name.startswith("embed"):
            torch.nn.init.normal_(parameter, std=0.5)
    return built


@pytest.fixture
def model(pipeline):
    return build(pipeline)


def table(model):
    return model.state_dict()["embed.tables.dim_8.embeddings.item_id_table.weight"]


def test_build_model_makes_a_retriever(model):
    assert isinstance(model, Retriever)


def test_a_row_is_answered_alike_alone_and_in_a_batch(model, pipeline):
    rows = random_rows(pipeline, SIZES)
    together = model(batch_of(pipeline, rows)).queries.split([n for n, _ in SIZES])
    for row, expected in zip(rows, together, strict=True):
        actual = model(batch_of(pipeline, [row])).queries
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_the_future_does_not_reach_the_past(model, pipeline):
    row = random_row(pipeline, 6, 1)
    before = model(batch_of(pipeline, [row])).queries
    neighbor = random_row(pipeline, 6, 1, seed=9)
    for cut in range(1, 6):
        after = model(batch_of(pipeline, [with_another_future(row, neighbor, cut)])).queries
        assert torch.equal(after[:cut], before[:cut])
        assert not torch.isclose(after[cut:], before[cut:]).all(1).any()


@pytest.mark.parametrize("mixer", ["", ROTARY], ids=["hstu", "rotary"])
@pytest.mark.parametrize("knows", [True, False])
def test_a_query_that_knows_its_own_time_only_does_not_see_the_time_of_its_target(knows, mixer):
    change = "model { retriever { preprocessor { uih { query_time: LAST_EVENT } } } }"
    pipeline = pipeline_of(RETRIEVER, mixer, "" if knows else change)
    model = build(pipeline)
    row = random_row(pipeline, 6, 1)
    later = row.changed(request_time=row.request_time + 10**6)
    asked, asked_later = (model.query(batch_of(pipeline, [given])) for given in (row, later))
    assert torch.equal(asked, asked_later) != knows
    # In training the target of a position is the next event.
    times = [*row.uih_timestamps[:5], row.uih_timestamps[5] - 10**6]
    queries, moved = (
        model(batch_of(pipeline, [given])).queries for given in (row, row.changed(uih_timestamps=times))
    )
    assert torch.equal(queries[4], moved[4]) != knows
    assert torch.equal(queries[:4], moved[:4])


def test_later_events_may_be_missing(model, pipeline):
    row = random_row(pipeline, 6, 1)
    whole = model(batch_of(pipeline, [row])).queries
    for length in range(1, 6):
        start = row.changed(
            uih_item_id=row.values["uih_item_id"][:length],
            uih_actions=row.uih_actions[:length],
            uih_watch_time=row.uih_watch_time[:length],
            uih_timestamps=row.uih_timestamps[:length],
            request_time=row.uih_timestamps[length],
        )
        torch.testing.assert_close(model.query(batch_of(pipeline, [start]))[0], whole[length - 1])


def test_the_candidate_does_not_reach_the_query(model, pipeline):
    rows = random_rows(pipeline, SIZES)
    changed = [row.changed(candidate_item_id=[20] * len(row.candidate_timestamps)) for row in rows]
    assert torch.equal(model.query(batch_of(pipeline, rows)), model.query(batch_of(pipeline, changed)))


def test_the_query_is_the_last_position_and_zero_without_history(model, pipeline):
    batch = batch_of(pipeline, random_rows(pipeline, SIZES))
    queries, actual = model(batch).queries, model.query(batch)
    torch.testing.assert_close(
        actual, torch.stack([queries[2], torch.zeros(8), queries[8], queries[10], queries[11]])
    )
    assert last_of_each(torch.zeros(0, 3), torch.zeros(2, dtype=torch.int64)).tolist() == [[0, 0, 0]] * 2


def test_item_vectors_are_the_table_without_its_unknown_row(model, pipeline):
    batch = batch_of(pipeline, random_rows(pipeline, SIZES))
    torch.testing.assert_close(model.item_vectors(batch), normalize(table(model)[1:], dim=1))
    plain = pipeline_of(RETRIEVER, "model { retriever { l2_normalize: false } }")
    untouched = build(plain)
    torch.testing.assert_close(
        untouched.item_vectors(batch_of(plain, random_rows(plain, SIZES))), table(untouched)[1:]
    )


def next_item_losses(model, rows, queries, negatives=None):
    """Sum of weight x loss and of weights, position by position; negatives are table rows, None for all."""
    items = normalize(table(model), dim=1)
    total = count = n = 0
    for row in rows:
        ids = row.values["uih_item_id"]
        for i in range(len(ids)):
            if i + 1 < len(ids) and ids[i + 1] > 0:
                wanted = ids[i + 1]
                others = range(1, 21) if negatives is None else negatives
                scores = {k: math.exp(queries[n] @ items[k] / 0.05) for k in (*others, wanted)}
                weights = sum(scores[k] for k in others if k != wanted) + scores[wanted]
                total += row.weight * -math.log(scores[wanted] / weights)
                count += row.weight
            n += 1
    return total, count


def weighted_rows(pipeline):
    rows = random_rows(pipeline, SIZES)
    rows[2].values["uih_item_id"][3] = 0  # unknown: an input, no target
    return [row.changed(weight=w) for row, w in zip(rows, (1.0, 1.0, 2.0, 0.5, 0.0), strict=True)]


def test_full_softmax_over_the_catalogue(model, pipeline):
    rows = weighted_rows(pipeline)
    batch = batch_of(pipeline, rows)
    outputs = model(batch)
    losses = model.objective(outputs, batch)
    total, count = next_item_losses(model, rows, outputs.queries.detach())
    assert losses.names == ("next_item",)
    assert losses.sums.item() == pytest.approx(total, rel=1e-4)
    assert losses.counts.item() == count


def test_sampled_softmax_over_shared_negatives():
    pipeline = pipeline_of(RETRIEVER, UNIFORM)
    model, rows = build(pipeline), weighted_rows(pipeline)
    negatives = [5, rows[0].values["uih_item_id"][1], 7, 7, rows[2].values["uih_item_id"][5]]
    batch = batch_of(pipeline, rows, negatives)
    outputs = model(batch)
    losses = model.objective(outputs, batch)
    total, count = next_item_losses(model, rows, outputs.queries.detach(), negatives)
    assert losses.sums.item() == pytest.approx(total, rel=1e-4)
    assert losses.counts.item() == count


def encoded(model, pipeline):
    """The vector of every item by the formula, from weights and what is known of it; row 0 is no item."""
    weights, encode = model.state_dict(), model.compare.encode
    tags = weights["embed.tables.dim_4.embeddings.tags_table.weight"]
    actual = [torch.zeros(8)]
    for row in range(1, 21):
        known = catalogue_item(pipeline, row)
        tag = tags[known["catalogue_tags"]].mean(0) if known["catalogue_tags"] else torch.zeros(4)
        joined = torch.cat([table(model)[row], tag, torch.tensor([known["catalogue_price"]])])
        actual.append(normalize(encode.layers(joined), dim=0))
    return torch.stack(actual).detach()


def test_items_of_a_two_tower_model_are_encoded():
    pipeline = pipeline_of(TWO_TOWER)
    model = build(pipeline)
    batch = batch_of(pipeline, random_rows(pipeline, SIZES))
    torch.testing.assert_close(model.item_vectors(batch), encoded(model, pipeline)[1:])
    assert torch.equal(model(batch).items, model.item_vectors(batch))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("two_tower", [False, True])
def test_in_batch_negatives_are_the_drawn_and_the_distinct_items_of_the_batch(weighted, two_tower):
    pipeline = pipeline_of(TWO_TOWER) if two_tower else pipeline_of(RETRIEVER, IN_BATCH)
    model, rows = build(pipeline), weighted_rows(pipeline)
    batch = batch_of(pipeline, rows, NEGATIVES)
    known = sorted({item for row in rows for item in row.values["uih_item_id"] if item})
    negatives = [*NEGATIVES, *known]
    log_weights = torch.randn(len(negatives)) if weighted else torch.zeros(len(negatives))
    if weighted:
        batch.numbers["log_weights"] = log_weights
    outputs = model(batch)
    losses = model.objective(outputs, batch)
    vectors = encoded(model, pipeline) if two_tower else normalize(table(model), dim=1)
    total = count = n = 0
    for row in rows:
        ids = row.values["uih_item_id"]
        for i in range(len(ids)):
            if i + 1 < len(ids) and ids[i + 1] > 0:
                query = outputs.queries[n].detach()
                others = [k for k, item in enumerate(negatives) if item != ids[i + 1]]
                scores = [float(query @ vectors[negatives[k]]) / 0.05 + float(log_weights[k]) for k in others]
                true_score = float(query @ vectors[ids[i + 1]]) / 0.05
                total += row.weight * (math.log(sum(map(math.exp, [true_score, *scores]))) - true_score)
                count += row.weight
            n += 1
    assert losses.sums.item() == pytest.approx(total, rel=1e-4)
    assert losses.counts.item() == count


@pytest.mark.parametrize("change", [UNIFORM, IN_BATCH])
def test_evaluation_reports_the_full_softmax_whatever_training_draws(change):
    pipeline = pipeline_of(RETRIEVER, change)
    model, rows = build(pipeline), weighted_rows(pipeline)
    batch = batch_of(pipeline, rows)
    outputs = model(batch)
    total, _ = next_item_losses(model, rows, outputs.queries.detach())
    assert model.objective(outputs, batch).sums.item() == pytest.approx(total, rel=1e-4)


def test_nothing_but_unknown_items_and_no_drawn_ones_is_a_loss_of_0():
    pipeline = pipeline_of(
        TWO_TOWER, "model { retriever { loss { softmax { in_batch { num_uniform: 0 } } } } }"
    )
    model = build(pipeline).train()
    row = random_row(pipeline, 3, 1).changed(uih_item_id=[0, 0, 0])
    batch = batch_of(pipeline, [row], [])
    losses = model.objective(model(batch), batch)
    assert (losses.sums.item(), losses.counts.item()) == (0, 0)
    losses.sums.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    "texts",
    [(RETRIEVER,), (RETRIEVER, UNIFORM), (RETRIEVER, IN_BATCH), (TWO_TOWER,), (TWO_TOWER, LEARNED)],
    ids=["full", "uniform", "in batch", "two tower", "learned temperature"],
)
def test_every_parameter_gets_a_gradient(texts):
    pipeline = pipeline_of(*texts)
    model = build(pipeline).train()
    assert ("objective.loss.log_excess" in dict(model.named_parameters())) == (LEARNED in texts)
    negatives = None if len(texts) == 1 and texts[0] is RETRIEVER else NEGATIVES
    batch = batch_of(pipeline, random_rows(pipeline, SIZES), negatives)
    model.objective(model(batch), batch).sums.sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("change", ["", UNIFORM, IN_BATCH], ids=["full", "uniform", "in batch"])
def test_in_bfloat16_the_loss_of_a_step_is_of_rounded_vectors_in_float32(change):
    """And an evaluation compares vectors in float32."""
    pipeline = pipeline_of(RETRIEVER, change, "model { precision: BF16 }")
    model = build(pipeline).train()
    batch = batch_of(pipeline, random_rows(pipeline, SIZES), NEGATIVES if change else None)
    outputs = model(batch)
    assert outputs.queries.dtype == outputs.items.dtype == outputs.batch_items.dtype == torch.bfloat16
    losses = model.objective(outputs, batch)
    assert losses.sums.dtype == torch.float32
    wide = RetrieverOutputs(*(item.detach().double() for item in vars(outputs).values()))
    torch.testing.assert_close(
        losses.sums.double(), model.objective(wide, batch).sums.double(), rtol=1e-5, atol=0
    )
    losses.sums.sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []
    outputs = model.eval()(batch)
    assert outputs.queries.dtype == outputs.items.dtype == torch.float32


def test_rows_without_targets(model, pipeline):
    batch = batch_of(pipeline, random_rows(pipeline, [(1, 1), (0, 1)]))
    losses = model.objective(model(batch), batch)
    assert (losses.sums.item(), losses.counts.item()) == (0, 0)
    losses.sums.sum().backward()


def test_ranks_and_metrics_follow_from_scores_by_hand(model, pipeline):
    rows = [
        row.changed(weight=w) for row, w in zip(random_rows(pipeline, SIZES), (1, 1, 2, 1, 0), strict=True)
    ]
    batch = batch_of(pipeline, rows)
    outputs, queries = model(batch), model.query(batch)
    items = normalize(table(model), dim=1)
    expected, weights = [], []
    for row, query in zip(rows, queries, strict=True):
        for target in row.values["candidate_item_id"]:
            others = set(range(1, 21)) - set(row.values["uih_item_id"]) - {target}
            better = sum(bool(query @ items[k] >= query @ items[target]) for k in others)
            expected.append(21 if target in row.values["uih_item_id"] else 1 + better)
            weights.append(row.weight)
    assert model.ranks(outputs, batch).tolist() == expected
    # Without history every item scores 0 and all ties count against the model.
    assert expected[1] == 20
    metrics = model.metrics()
    assert list(metrics) == ["hit_rate@5", "mrr"]
    model.update_metrics(metrics, outputs, batch)
    reciprocal = sum(w / rank for w, rank in zip(weights, expected, strict=True)) / sum(weights)
    assert metrics["mrr"].compute().item() == pytest.approx(reciprocal)


@pytest.mark.parametrize("change", ["", UNIFORM])
def test_an_evaluation_looks_the_catalogue_up_once(change):
    pipeline = pipeline_of(RETRIEVER, change)
    model = build(pipeline)
    batches = [batch_of(pipeline, random_rows(pipeline, SIZES[:n])) for n in (3, 1, 5)]
    expected = [model(batch) for batch in batches]
    ranks = torch.cat([model.ranks(outputs, batch) for outputs, batch in zip(expected, batches, strict=True)])
    losses = [model.objective(outputs, batch) for outputs, batch in zip(expected, batches, strict=True)]
    looked_up = []
    model.embed.register_forward_pre_hook(
        lambda _, given: looked_up.append(given[0].ids["negatives"].values().tolist())
    )
    actual = evaluate(model, SimpleNamespace(first=lambda _: iter(batches)), torch.device("cpu"))
    assert looked_up == [batches[0].ids["negatives"].values().tolist(), [], []]
    assert actual["mrr"] == pytest.approx((1 / ranks).mean().item())
    sums, counts = (sum(getattr(loss, name).item() for loss in losses) for name in ("sums", "counts"))
    assert actual["loss"] == pytest.approx(sums / counts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('model { retriever { item_feature: "shop" } }', "item_feature: no feature is called 'shop'"),
        (
            "model { retriever { preprocessor { contextual {} } } }",
            "preprocessor.contextual: does not fit a retriever; use uih",
        ),
        (
            "model { retriever { preprocessor { uih { positional { origin: END } } } } }",
            "positional.origin: END tells each position how many events follow",
        ),
        (
            "model { retriever { preprocessor { uih { positional { num_time_buckets: 4 } } } } }",
            "positional.num_time_buckets: the age at the request tells how much history follows; use 0",
        ),
        (
            "model { retriever { mixer { hstu { layer_groups { tail_len: 3 } } } } }",
            r"layer_groups\[0\].tail_len: next-item training makes every event a query",
        ),
    ],
)
def test_what_cannot_train_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        build_model(pipeline_of(RETRIEVER, change))


def test_items_must_be_as_wide_as_queries():
    pipeline = pipeline_of(RETRIEVER)
    pipeline.features[0].id.embedding_dim = 4
    with pytest.raises(ValueError, match="id.embedding_dim: 4 is given; items are compared with queries of"):
        build_model(pipeline)
