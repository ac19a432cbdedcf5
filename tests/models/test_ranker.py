import math

import pytest
import torch

from recsys import protos as pb
from recsys.models import Ranker, build_model
from tests.modules.pipelines import RANKER, batch_of, pipeline_of, random_row, random_rows

SIZES = [(3, 2), (0, 1), (6, 4), (2, 0), (1, 3)]
MIXERS = {
    "hstu": "",
    "sasrec": "model { ranker { mixer { sasrec { num_heads: 2 } } } }",
}


@pytest.fixture(params=MIXERS)
def pipeline(request):
    return pipeline_of(RANKER, MIXERS[request.param])


@pytest.fixture
def model(pipeline):
    built = build_model(pipeline).eval()
    for name, parameter in built.named_parameters():
        if not name.startswith("embed"):
            torch.nn.init.normal_(parameter, std=0.5)
    return built


def logits(model, pipeline, rows):
    return model(batch_of(pipeline, rows)).logits


def test_build_model_makes_a_ranker(model):
    assert isinstance(model, Ranker)


@pytest.mark.parametrize(
    "change",
    [
        {"uih_actions": [0, 9, 0, 0, 0]},
        {"uih_watch_time": [0.0, 0.0, 0.0, 0.0, 99.0]},
        {"uih_item_id": [1, 2, 3, 4, 5]},
        {"uih_tags": [[1], [2], [], [], []]},
        {"gender": 1},
        {"age": 3.0},
        {"candidate_price": [9.0]},
        {"uih_timestamps": [1, 2, 3, 4, 5]},
        {"candidate_timestamps": [1_700_000_000]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_input_reaches_the_scores(change):
    pipeline = pipeline_of(RANKER)
    model = build_model(pipeline).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    row = random_row(pipeline, 5, 1, seed=3).changed(gender=2, uih_actions=[1] * 5, uih_watch_time=[5.0] * 5)
    actual = logits(model, pipeline, [row.changed(**change)])
    assert (actual - logits(model, pipeline, [row])).norm() > 1e-4


def test_every_parameter_gets_a_gradient(model, pipeline):
    # Rows at the limits, so that every row of the position tables is used.
    batch = batch_of(pipeline, random_rows(pipeline, [*SIZES, (6, 4)]))
    losses = model.objective(model(batch), batch)
    losses.sums.sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_predictions_are_what_the_losses_mean(model, pipeline):
    outputs = model(batch_of(pipeline, random_rows(pipeline, SIZES)))
    predictions = [outputs.predictions[task].tolist() for task in ("click", "seconds")]
    for (click, seconds), p, watched in zip(outputs.logits.tolist(), *predictions, strict=True):
        assert p == pytest.approx(1 / (1 + math.exp(-click)), rel=1e-5)
        assert watched == pytest.approx(max(0, math.exp(seconds) - 1), rel=1e-4, abs=1e-6)


def test_score_stacks_predictions_in_the_order_of_tasks(model, pipeline):
    batch = batch_of(pipeline, random_rows(pipeline, SIZES))
    predictions = model(batch).predictions
    expected = torch.stack([predictions["click"], predictions["seconds"]], dim=1)
    torch.testing.assert_close(model.score(batch), expected)


def test_losses_are_weighted_sums_over_candidates(model, pipeline):
    rows = [
        row.changed(weight=w) for row, w in zip(random_rows(pipeline, SIZES), (1, 2, 0.5, 1, 0), strict=True)
    ]
    batch = batch_of(pipeline, rows)
    outputs = model(batch)
    losses = model.objective(outputs, batch)
    click = seconds = count = 0.0
    numbers = iter(outputs.logits.tolist())
    for row in rows:
        for y, s in zip(row.labels["click"], row.labels["seconds"], strict=True):
            logit, predicted = next(numbers)
            click += row.weight * (math.log1p(math.exp(-logit)) if y else math.log1p(math.exp(logit)))
            seconds += row.weight * (predicted - math.log1p(s)) ** 2
            count += row.weight
    assert losses.names == ("click", "seconds")
    assert losses.weights == (1.0, 0.5)
    assert losses.sums.tolist() == pytest.approx([click, seconds], rel=1e-4)
    assert losses.counts.tolist() == pytest.approx([count, count])


def test_no_candidates_at_all(model, pipeline):
    batch = batch_of(pipeline, random_rows(pipeline, [(2, 0), (0, 0)]))
    losses = model.objective(model(batch), batch)
    assert losses.sums.tolist() == [0, 0]
    assert losses.counts.tolist() == [0, 0]
    losses.sums.sum().backward()


def test_metrics_see_each_candidate_with_its_rows_weight(model, pipeline):
    rows = [
        row.changed(weight=w) for row, w in zip(random_rows(pipeline, SIZES), (1, 2, 0.5, 1, 0), strict=True)
    ]
    batch = batch_of(pipeline, rows)
    metrics = model.metrics()
    assert list(metrics) == ["click/auc", "click/log_loss", "seconds/mae"]
    outputs = model(batch)
    model.update_metrics(metrics, outputs, batch)
    losses = model.objective(outputs, batch)
    # Log loss is the binary cross-entropy that training takes the mean of.
    expected = (losses.sums[0] / losses.counts[0]).item()
    assert metrics["click/log_loss"].compute().item() == pytest.approx(expected, rel=1e-4)


def test_a_ranker_needs_tasks_and_targets():
    pipeline = pipeline_of(RANKER)
    del pipeline.model.ranker.tasks[:]
    with pytest.raises(ValueError, match=r"model.ranker.tasks: none is given"):
        build_model(pipeline)
    pipeline = pipeline_of(RANKER)
    pipeline.model.ranker.preprocessor.uih.SetInParent()
    with pytest.raises(
        ValueError, match="UihPreprocessor makes no tokens of candidates; choose `contextual`"
    ):
        build_model(pipeline)


def test_features_may_be_called_like_attributes_of_modules():
    pipeline = pipeline_of(RANKER)
    for feature, name in zip(pipeline.features, ("type", "values", "keys", "items", "training"), strict=True):
        feature.name = name
        if feature.HasField("id"):
            feature.id.table = name
    build_model(pipeline)(batch_of(pipeline, random_rows(pipeline, SIZES)))


def test_bfloat16_stays_close_and_answers_in_float32():
    pipeline = pipeline_of(RANKER)
    torch.manual_seed(1)
    exact = build_model(pipeline).eval()
    pipeline.model.precision = pb.BF16
    torch.manual_seed(1)
    rounded = build_model(pipeline).eval()
    batch = batch_of(pipeline, random_rows(pipeline, SIZES))
    a, b = exact(batch).logits, rounded(batch).logits
    assert b.dtype == torch.float32
    assert not torch.equal(a, b)
    assert (a - b).norm() / a.norm() < 0.05
    losses = rounded.objective(rounded(batch), batch)
    assert losses.sums.dtype == torch.float32
    losses.sums.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in rounded.parameters())
