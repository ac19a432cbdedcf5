"""The settings that decide how a split is measured."""

import json

import pytest

from recsys import config
from recsys.evaluation.protocol import describe, protocol


@pytest.mark.parametrize("ties", ['{"order": "shuffle", "seed": 3, "share": 0.44}', "[]", None])
def test_a_retriever_names_its_rules_and_the_order_of_ties(tmp_path, ties):
    pipeline = config.prepare("configs/movielens_small_retrieval.config", []).pipeline
    pipeline.data.vocabulary_dir = str(tmp_path / "vocabulary")
    if ties is not None:
        (tmp_path / "schema.json").write_text(f'{{"ties": {ties}}}')
    rules = {"seen": "REMOVE", "repeated_targets": "MISS", "query_time": "TARGET"}
    if ties is None or ties == "[]":
        assert protocol(pipeline) == rules
        return
    assert protocol(pipeline) == rules | {"ties": json.loads(ties)}
    line = "seen REMOVE, repeated_targets MISS, query_time TARGET, ties shuffle"
    assert describe(protocol(pipeline)) == line


def test_kept_items_miss_nothing_and_a_damaged_schema_is_no_obstacle(tmp_path, caplog):
    pipeline = config.prepare(
        "configs/amazon_beauty_sasrec.config", ["model.retriever.seen=KEEP"], read_files=False
    )
    pipeline.pipeline.data.vocabulary_dir = str(tmp_path / "vocabulary")
    (tmp_path / "schema.json").write_text('{"ties": ')
    assert protocol(pipeline.pipeline) == {"seen": "KEEP"}
    assert f"{tmp_path}/schema.json: damaged (" in caplog.text
