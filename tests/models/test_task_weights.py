"""Weights of losses from columns, and tasks that count only some candidates; against loops in float64."""

import math
from dataclasses import replace

import pytest
import torch

from recsys.models.retriever import NextItemLoss, RetrieverOutputs
from recsys.models.tasks import TaskLosses, TaskOutputs, task_metrics, task_rows
from tests.modules.pipelines import RANKER, RETRIEVER, batch_of, pipeline_of, random_rows

SIZES = [(3, 3), (0, 1), (2, 4), (2, 0), (1, 2)]
ROW_WEIGHTS = (1, 2, 0.5, 1, 0)
"""Weight 0 is that of a filler row."""
VALUES = {
    "importance": [3.0, 0.0, 0.25, 9.0, 1.0],
    "candidate_value": [1.5, 0.0, 2.0, 4.0, 0.5, 1.0, 0.0, 3.0, 7.0, 7.0],
}
TASKS = """model { ranker {
  tasks { name: "buy"  given_task: "click"  weight_column: "importance"  loss { binary_cross_entropy {} }
    metrics { log_loss {} } }
  tasks { name: "like"  given_task: "click"  loss { %s } }
} }"""
PAIRS = "pairwise { pointwise_share: 0.75 }"


def make(loss: str = PAIRS, change: str = 'weight_column: "candidate_value"'):
    """Tasks click, seconds, buy and like, the first with a change, their batch and random logits."""
    pipeline = pipeline_of(RANKER, TASKS % loss)
    for name in ("click", "seconds"):
        task = next(task for task in pipeline.model.ranker.tasks if task.name == name)
        task.weight_column = "candidate_value" if change else ""
    rows = random_rows(pipeline, SIZES, seed=4)
    rows = [row.changed(weight=weight) for row, weight in zip(rows, ROW_WEIGHTS, strict=True)]
    weights = {name: torch.tensor(values) for name, values in VALUES.items()}
    batch = replace(batch_of(pipeline, rows), weights=weights)
    tasks = pipeline.model.ranker.tasks
    width = sum(loss.num_logits for loss in TaskLosses(tasks).losses)
    logits = torch.randn(10, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return pipeline, rows, batch, tasks, logits


def binary(logit: float, label: float) -> float:
    return math.log1p(math.exp(-logit if label else logit))


def test_sums_and_counts_are_those_of_the_formula():
    """sum(weight * loss) and sum(weight): per candidate, per row, and where the other task's label is 1."""
    _, rows, batch, tasks, logits = make()
    losses = TaskLosses(tasks)(TaskOutputs(logits, {}), batch)
    sums, counts, place = [0.0] * 4, [0.0] * 4, 0
    for number, row in enumerate(rows):
        clicked = [i for i, label in enumerate(row.labels["click"]) if label]
        for i in range(len(row.candidate_timestamps)):
            click, seconds, buy, like = logits[place].tolist()
            labels = {name: values[i] for name, values in row.labels.items()}
            value = row.weight * VALUES["candidate_value"][place]
            rivals = [j for j in clicked if row.labels["like"][j] != labels["like"]]
            sign = 1 if labels["like"] else -1
            pairs = [math.log1p(math.exp(-sign * (like - logits[place - i + j, 3].item()))) for j in rivals]
            compared = 0.75 * binary(like, labels["like"]) + 0.25 * sum(pairs) / max(1, len(pairs))
            given = row.weight * labels["click"]
            entries = [
                (value, binary(click, labels["click"])),
                (value, (seconds - math.log1p(labels["seconds"])) ** 2),
                (given * VALUES["importance"][number], binary(buy, labels["buy"])),
                (given, compared),
            ]
            for task, (weight, loss) in enumerate(entries):
                sums[task] += weight * loss
                counts[task] += weight
            place += 1
    assert losses.sums.tolist() == pytest.approx(sums, rel=1e-12)
    assert losses.counts.tolist() == pytest.approx(counts, rel=1e-6)
    assert 0 < counts[3] < sum(row.weight * len(row.candidate_timestamps) for row in rows)


@pytest.mark.parametrize("loss", [PAIRS, "jrc {}", "jrc { rivals: WHOLE_ROW }"])
def test_candidates_that_do_not_count_are_no_rivals(loss):
    """Sums and gradients are as if the batch had no other candidates."""
    pipeline, rows, batch, tasks, logits = make(loss)
    logits.requires_grad_()
    actual = TaskLosses(tasks)(TaskOutputs(logits, {}), batch)
    clicked = [[i for i, label in enumerate(row.labels["click"]) if label] for row in rows]
    kept = [row.with_candidates(keep) for row, keep in zip(rows, clicked, strict=True)]
    alone = pipeline_of(RANKER, TASKS % loss).model.ranker.tasks
    alone[3].given_task = ""
    places = batch.labels["click"].nonzero()[:, 0]
    values = {
        "importance": batch.weights["importance"],
        "candidate_value": batch.weights["candidate_value"][places],
    }
    fewer = replace(batch_of(pipeline, kept), weights=values)
    expected = TaskLosses(alone)(TaskOutputs(logits[places], {}), fewer)
    assert actual.sums[3].item() == pytest.approx(expected.sums[3].item(), rel=1e-12)
    assert actual.counts[3] == expected.counts[3]
    (grad,) = torch.autograd.grad(actual.sums[3], logits)
    (want,) = torch.autograd.grad(expected.sums[3], logits)
    torch.testing.assert_close(grad, want, rtol=1e-12, atol=1e-14)


def test_the_sums_of_ranks_add_up_to_those_of_one():
    """Training divides the sums of all ranks by their counts; the last rank counts no candidate."""
    pipeline, rows, batch, tasks, logits = make()
    objective = TaskLosses(tasks)
    whole = objective(TaskOutputs(logits, {}), batch)
    sums, counts, start = torch.zeros(4, dtype=torch.float64), torch.zeros(4), 0
    for begin, end in ((0, 2), (2, 3), (3, 5)):
        share = rows[begin:end]
        stop = start + sum(len(row.candidate_timestamps) for row in share)
        values = {
            "importance": batch.weights["importance"][begin:end],
            "candidate_value": batch.weights["candidate_value"][start:stop],
        }
        part = replace(batch_of(pipeline, share), weights=values)
        losses = objective(TaskOutputs(logits[start:stop], {}), part)
        sums, counts, start = sums + losses.sums, counts + losses.counts, stop
    torch.testing.assert_close(sums, whole.sums, rtol=1e-12, atol=0)
    torch.testing.assert_close(counts, whole.counts)


def test_metrics_count_the_candidates_of_the_task_and_no_weights():
    _, rows, batch, tasks, logits = make()
    probability = torch.sigmoid(logits[:, 2])
    rest = {task.name: logits[:, 0] for task in tasks}
    metric = task_metrics(tasks)["buy/log_loss"]
    metric.update(*task_rows(TaskOutputs(logits, rest | {"buy": probability}), batch, tasks)["buy"])
    total, count, scores = 0.0, 0.0, iter(probability.tolist())
    for row in rows:
        for buy, click in zip(row.labels["buy"], row.labels["click"], strict=True):
            p = next(scores)
            total -= row.weight * click * math.log(p if buy else 1 - p)
            count += row.weight * click
    assert metric.compute().item() == pytest.approx(total / count, rel=1e-12)


@pytest.mark.parametrize("column", ["importance", "uih_value"])
def test_next_item_losses_are_weighted_by_row_or_by_predicted_event(column):
    pipeline = pipeline_of(RETRIEVER)
    rows = random_rows(pipeline, SIZES, seed=2)
    rows = [row.changed(weight=weight) for row, weight in zip(rows, ROW_WEIGHTS, strict=True)]
    generator = torch.Generator().manual_seed(3)
    queries, items = (torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (8, 20))
    weights = {
        "importance": torch.tensor(VALUES["importance"]),
        "uih_value": torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0, 4.0, 0.25, 5.0]),
    }
    batch = replace(batch_of(pipeline, rows), weights=weights)
    config = pipeline.model.retriever.loss
    objective = NextItemLoss(config, "uih_item_id", num_items=20, l2_normalize=False, weight_column=column)
    losses = objective(RetrieverOutputs(queries, items, queries[:0]), batch)
    scores = (queries @ items.T / config.softmax.temperature).log_softmax(1)
    total, count, first = 0.0, 0.0, 0
    for number, row in enumerate(rows):
        history = row.values["uih_item_id"]
        for i in range(len(history) - 1):
            of_event = weights["uih_value"][first + i + 1].item()
            weight = row.weight * (VALUES["importance"][number] if column == "importance" else of_event)
            total -= weight * scores[first + i, history[i + 1] - 1].item()
            count += weight
        first += len(history)
    assert losses.sums.item() == pytest.approx(total, rel=1e-5)
    assert losses.counts.item() == pytest.approx(count)
