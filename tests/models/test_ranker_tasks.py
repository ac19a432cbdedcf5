"""Heads and losses inside a ranker: which logits a task gets, whom its loss compares, what it predicts."""

import math

import pytest
import torch

from recsys.models import build_model
from tests.modules.pipelines import RANKER, batch_of, pipeline_of, random_rows

SIZES = [(3, 3), (0, 1), (6, 4), (2, 0), (1, 2)]
WEIGHTS = (1, 2, 0.5, 1, 0)
HEADS = {
    "fusion": "fusion { mlp { hidden: 8 } input: CONCAT }",
    "mmoe": "mmoe { expert_dim: 5 gate { hidden: 3 } }",
    "ple": "ple { expert_dim: 5 num_levels: 2 tower { hidden: 6 } }",
}
TASKS = """
tasks { name: "like"  weight: 2  loss { jrc { pointwise_share: 0.25 } }  metrics { auc {} } }
tasks { name: "share"  loss { pairwise { pointwise_share: 0.75 } }  metrics { log_loss {} } }
"""


@pytest.fixture(params=HEADS)
def pipeline(request):
    return pipeline_of(RANKER, f"model {{ ranker {{ head {{ {HEADS[request.param]} }} {TASKS} }} }}")


@pytest.fixture
def model(pipeline):
    torch.manual_seed(8)
    built = build_model(pipeline).eval()
    for name, parameter in built.named_parameters():
        if not name.startswith("embed"):
            torch.nn.init.normal_(parameter, std=0.4)
    return built


@pytest.fixture
def rows(pipeline):
    drawn = random_rows(pipeline, SIZES, seed=5)
    return [row.changed(weight=weight) for row, weight in zip(drawn, WEIGHTS, strict=True)]


def log1p_exp(x: float) -> float:
    return math.log1p(math.exp(x))


def test_each_task_gets_its_logits(model, pipeline, rows):
    """Click 1, seconds 1, like 2, share 1; a loss's gradient stays in its own."""
    batch = batch_of(pipeline, rows)
    outputs = model(batch)
    assert outputs.logits.shape == (10, 5)
    results = []
    for number in range(4):
        losses = model.objective(outputs, batch)
        (grad,) = torch.autograd.grad(losses.sums[number], outputs.logits, retain_graph=True)
        results.append(grad.any(0).tolist())
    assert [[i for i, used in enumerate(item) if used] for item in results] == [[0], [1], [2, 3], [4]]


def test_losses_over_rows_are_weighted_sums(model, pipeline, rows):
    batch = batch_of(pipeline, rows)
    outputs = model(batch)
    logits, like, share = iter(outputs.logits.tolist()), 0.0, 0.0
    for row in rows:
        scored = [next(logits)[2:] for _ in row.candidate_timestamps]
        for (*z, s), y, y_share in zip(scored, row.labels["like"], row.labels["share"], strict=True):
            y = int(y)
            rivals = [
                math.exp(score[y])
                for score, label in zip(scored, row.labels["like"], strict=True)
                if label != y
            ]
            by_class = log1p_exp(z[1 - y] - z[y])
            like += row.weight * (0.25 * by_class + 0.75 * (math.log(sum(rivals) + math.exp(z[y])) - z[y]))
            sign = 1 if y_share else -1
            pairs = [
                log1p_exp(-sign * (s - score[2]))
                for score, label in zip(scored, row.labels["share"], strict=True)
                if label != y_share
            ]
            mean = sum(pairs) / len(pairs) if pairs else 0.0
            share += row.weight * (0.75 * log1p_exp(-sign * s) + 0.25 * mean)
    losses = model.objective(outputs, batch)
    assert losses.names == ("click", "seconds", "like", "share")
    assert losses.sums[2:].tolist() == pytest.approx([like, share], rel=1e-4)
    assert losses.counts.tolist() == [3 + 2 + 0.5 * 4] * 4


def test_predictions_and_scores(model, pipeline, rows):
    batch = batch_of(pipeline, rows)
    outputs = model(batch)
    for logits, like, share in zip(
        outputs.logits.tolist(), *(outputs.predictions[n].tolist() for n in ("like", "share")), strict=True
    ):
        assert like == pytest.approx(1 / (1 + math.exp(logits[2] - logits[3])), rel=1e-5)
        assert share == pytest.approx(1 / (1 + math.exp(-logits[4])), rel=1e-5)
    score = model.score(batch)
    assert score.shape == (10, 4)
    assert torch.equal(score[:, 2], outputs.predictions["like"])


def test_metrics_take_the_predictions(model, pipeline, rows):
    batch = batch_of(pipeline, rows)
    metrics = model.metrics()
    model.update_metrics(metrics, model(batch), batch)
    assert {"like/auc", "share/log_loss"} <= set(metrics)
    assert 0 <= metrics["like/auc"].compute() <= 1 and metrics["share/log_loss"].compute() > 0


def test_every_parameter_of_the_head_gets_a_gradient(model, pipeline, rows):
    batch = batch_of(pipeline, rows)
    model.objective(model(batch), batch).sums.sum().backward()
    named = model.head.named_parameters()
    assert [name for name, p in named if p.grad is None or not p.grad.any()] == []


def test_no_candidates_at_all(model, pipeline):
    batch = batch_of(pipeline, random_rows(pipeline, [(2, 0), (0, 0)]))
    losses = model.objective(model(batch), batch)
    assert losses.sums.tolist() == losses.counts.tolist() == [0] * 4
    losses.sums.sum().backward()


def test_flops_count_every_expert_of_every_candidate(model, pipeline, rows):
    batch = batch_of(pipeline, rows)
    weights = sum(p.numel() for name, p in model.head.named_parameters() if name.endswith("weight"))
    below = model.preprocess.flops(batch) + model.mix.flops(batch.layout)
    assert model.flops(batch) == below + 2 * 10 * weights
