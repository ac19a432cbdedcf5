"""Columns whose ids are nearly all unknown are named, once; others are not."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.data import unknown_ids
from recsys.data.batch import LayoutRule
from recsys.data.loader import Loader

RULE = LayoutRule(num_contextual=2, targets=True)


@pytest.fixture
def warnings(sample, caplog):
    """Warnings of two epochs over 120 rows of 3 events and 2 candidates, with these ids in the vocabulary."""

    def warnings(ids: list[int]) -> list[str]:
        pq.write_table(pa.table({"id": ids}), sample.folder / "vocabulary" / "item.parquet")
        sample.pipeline.features[1].id.vocabulary.size = len(ids)
        sample.write([sample.row(i) for i in range(120)], row_group_size=50)
        loader = Loader.open(sample.pipeline, "train", RULE, shuffle=True)
        for epoch in range(2):
            for _ in loader.epoch(epoch):
                pass
        return [record.getMessage() for record in caplog.records if record.name == unknown_ids.__name__]

    return warnings


def test_a_vocabulary_of_other_data_is_noticed_once(warnings):
    # A batch has 4 rows, so 12 events and 8 candidates: 200 are reached with 204 and 200.
    assert sorted(text.split(" ids are not in ")[0] for text in warnings([5, 6])) == [
        "candidate_item_id: 200 of the first 200",
        "uih_item_id: 204 of the first 204",
    ]


def test_one_known_item_of_six_is_enough_to_be_silent(warnings, sample):
    assert warnings([*sample.vocabulary[:1], 5, 6]) == []


def test_too_few_ids_are_not_judged(warnings, monkeypatch):
    monkeypatch.setattr(unknown_ids, "ENOUGH", 10_000)
    assert warnings([5, 6]) == []
