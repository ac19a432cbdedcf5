"""Metrics by popularity: the groups of items by hand, and sums of each group from ranks one by one."""

from pathlib import Path

import numpy as np
import pytest
import torch

from recsys.errors import ConfigError
from recsys.models import build_model
from recsys.models.popularity import GROUPS, popularity_groups, popularity_sums
from recsys.training.run import evaluate
from tests.modules.pipelines import RANKER, RETRIEVER, batch_of, generator_pipeline, pipeline_of, random_rows

CODES = np.array([[n % 3, n % 4] for n in range(20)])


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        # 12 events: thirds end at 4 and 8. Item 2 has events 1 to 5, whose middle is 2.5.
        ([0, 1, 5, 0, 3, 2, 1], ["tail", "head", "new", "middle", "tail", "tail"]),
        ([0, 2, 2, 2], ["head", "middle", "tail"]),
        ([0, 0, 0], ["new", "new"]),
        ([0, 7], ["middle"]),
        ([0], []),
    ],
)
def test_items_are_grouped_by_thirds_of_all_events(counts, expected):
    groups = popularity_groups(np.array(counts))
    assert groups[0] == -1 and [GROUPS[group] for group in groups[1:]] == expected


@pytest.mark.parametrize("family", ["generator", "retriever"])
def test_sums_of_a_group_are_those_of_its_targets(tmp_path, family):
    pipeline = generator_pipeline(tmp_path, CODES) if family == "generator" else pipeline_of(RETRIEVER)
    torch.manual_seed(0)
    model = build_model(pipeline).eval()
    batch = batch_of(pipeline, random_rows(pipeline, [(3, 9), (0, 9), (6, 9), (2, 0), (1, 9)]))
    groups = torch.tensor([-1] + [n % 4 for n in range(20)])
    with torch.no_grad():
        sums = popularity_sums(model, batch, groups)
        ranks = model.ranks(model(batch), batch).tolist()
    targets = batch.ids["candidate_item_id"].values().tolist()
    for index, name in enumerate(GROUPS):
        chosen = [rank for rank, item in zip(ranks, targets, strict=True) if item and (item - 1) % 4 == index]
        assert sums[f"targets/{name}"].tolist() == [len(chosen), len(targets)]
        gains = {"hit_rate@5": lambda rank: rank <= 5, "mrr": lambda rank: 1 / rank}
        assert set(gains) == set(model.metrics())
        for metric, gain in gains.items():
            expected = [sum(map(gain, chosen)), len(chosen)]
            assert sums[f"{metric}/{name}"].tolist() == pytest.approx(expected)


def test_a_ranker_has_no_metrics_by_popularity():
    pipeline = pipeline_of(RANKER, 'data { test { parquet { paths: "x" } } }')
    with pytest.raises(
        ConfigError, match="--compare-popularity: it is for next-item models; ranker searches"
    ):
        evaluate(pipeline, Path("x"), None, "test", "best", None, "popularity")
