"""Columns and tables of a config against what the data contract says they are called."""

import pytest
from google.protobuf import text_format

from recsys import config
from recsys import protos as pb
from recsys.config import features
from tests.config_texts import RANKER, RETRIEVER


def pipeline_of(text: str) -> pb.Pipeline:
    return config.resolve(text_format.Parse(text, pb.Pipeline()), read_files=False).pipeline


def test_columns_in_order_of_features_then_sides():
    text = RANKER.replace(
        'features { name: "city" sides: USER',
        'features { name: "watched" sides: [CANDIDATE, HISTORY] numeric { normalize {} } }\n'
        'features { name: "tag" sides: [CANDIDATE, USER, HISTORY]'
        " id { hash { num_buckets: 7 } multi_valued: true } }\n"
        'features { name: "city" sides: USER',
    )
    actual = [(c.name, c.table, c.width, c.multi_valued) for c in features.columns(pipeline_of(text))]
    assert actual == [
        ("uih_item_id", "item_id", 32, False),
        ("candidate_item_id", "item_id", 32, False),
        ("uih_author", "author", 8, False),
        ("candidate_author", "author", 8, False),
        ("uih_watched", None, 1, False),
        ("candidate_watched", None, 1, False),
        ("tag", "tag", 32, True),
        ("uih_tag", "tag", 32, True),
        ("candidate_tag", "tag", 32, True),
        ("city", "city", 32, False),
        ("age", "age", 32, False),
    ]


def test_columns_of_one_side():
    names = [column.name for column in features.columns(pipeline_of(RANKER), pb.USER)]
    assert names == ["city", "age"]


def test_tables_have_a_row_for_each_id_bucket_and_the_unknown():
    pipeline = pipeline_of(RANKER)
    pipeline.features[0].id.vocabulary.size = 500
    actual = [(table.name, table.rows, table.width, table.columns) for table in features.tables(pipeline)]
    assert actual == [
        # 500 ids and row 0.
        ("item_id", 501, 32, ("uih_item_id", "candidate_item_id")),
        ("author", 100, 8, ("uih_author", "candidate_author")),
        ("city", 10, 32, ("city",)),
        # Three limits make four buckets.
        ("age", 4, 32, ("age",)),
    ]


def test_negatives_read_the_items_of_a_retriever():
    (table,) = features.tables(pipeline_of(RETRIEVER))
    assert table == features.Table("movies", 11, 64, ("uih_item_id", "candidate_item_id", features.NEGATIVES))


def test_features_that_name_one_table_share_it():
    text = RANKER.replace(
        "hash { num_buckets: 10 }", 'hash { num_buckets: 100 } table: "author" embedding_dim: 8'
    )
    tables = {table.name: table for table in features.tables(pipeline_of(text))}
    assert tables["author"].columns == ("uih_author", "candidate_author", "city")
    assert "city" not in tables


def test_a_retriever_without_its_item_is_an_error():
    pipeline = pipeline_of(RETRIEVER)
    pipeline.model.retriever.item_feature = "movie"
    with pytest.raises(
        ValueError, match="model.retriever.item_feature: 'movie' is given; no id feature has this name"
    ):
        features.tables(pipeline)


def test_features_of_items_are_columns_of_the_catalogue_and_of_no_event_file():
    text = """
      features { name: "item_id" sides: [HISTORY, CANDIDATE] id { table: "movies" vocabulary { size: 10 } } }
      features { name: "genre" sides: [HISTORY, ITEM] id { table: "genres" hash { num_buckets: 5 } } }
      features { name: "price" sides: ITEM numeric { normalize {} } }
      model { retriever { item_feature: "item_id" loss { softmax { in_batch {} } } } }
    """
    pipeline = config.resolve(text_format.Parse(text, pb.Pipeline()), read_files=False).pipeline
    names = [column.name for column in features.columns(pipeline)]
    assert names == ["uih_item_id", "candidate_item_id", "uih_genre"]
    assert [c.name for c in features.columns(pipeline, pb.ITEM)] == ["catalogue_genre", "catalogue_price"]
    tables = {table.name: table.columns for table in features.tables(pipeline)}
    assert tables == {
        "movies": ("uih_item_id", "candidate_item_id", "negatives", "batch_items"),
        "genres": ("uih_genre", "catalogue_genre"),
    }
    pipeline.model.retriever.loss.softmax.full.SetInParent()
    assert features.shared_columns(pipeline) == ["negatives"]
