"""Answers of models: original ids in and out, equal to brute force over the vectors and to evaluation."""

from collections import Counter
from pathlib import Path

import fsspec
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import recsys
from recsys.data.schema.vocabulary import mappings
from recsys.errors import ConfigError, DataError, RecsysError
from tests.integration import runs

MOVIELENS, KUAIRAND = "tests/data/movielens", "tests/data/kuairand"
RETRIEVER = """
data { batch_size: 16 max_history_len: 20 key_columns: "user_id" }
features { name: "item_id" sides: [HISTORY, CANDIDATE] id { vocabulary {} } }
model {
  embedding_dim: 8
  embedding { placement: REPLICATED init_std: 0.5 }
  retriever {
    item_feature: "item_id"
    preprocessor { uih { positional {} } }
    mixer { hstu { num_heads: 1 qk_dim: 8 num_layers: 1 } }
    loss { softmax { full {} } }
    metrics { hit_rate { k: 10 } }
  }
}
train { num_steps: 1 }
"""


@pytest.fixture(scope="module")
def rows():
    """Validation rows of users with short histories, so that no event is cut off."""
    table = pl.read_parquet(f"{MOVIELENS}/validation.parquet")
    return table.filter(pl.col("uih_item_id").list.len() <= 20).head(12)


@pytest.fixture(scope="module")
def retriever(rows):
    return recsys.build(recsys.config(RETRIEVER, vocabularies=rows))


@pytest.fixture(scope="module")
def ranker():
    return recsys.build(recsys.config(runs.CONFIG))


@pytest.fixture(scope="module")
def requests():
    return pq.read_table(f"{KUAIRAND}/validation.parquet").slice(0, 200)


def vectors(table):
    return np.stack([np.asarray(vector, np.float32) for vector in table["vector"].to_pylist()])


def test_recommendations_are_the_best_unseen_items(retriever, rows):
    items, queries = retriever.embeddings(), retriever.embeddings(rows)
    assert queries["user_id"].to_pylist() == rows["user_id"].to_list()
    ids = np.array(items["id"].to_pylist())
    scores = vectors(queries) @ vectors(items).T
    for row, history in enumerate(rows["uih_item_id"].to_list()):
        scores[row, np.isin(ids, history)] = -np.inf
    order = np.argsort(-scores, axis=1, kind="stable")[:, :4]
    answer = retriever.recommend(rows, k=4)
    assert answer.column_names == ["user_id", "item_id", "score"]
    assert answer["item_id"].to_pylist() == ids[order].tolist()
    actual = np.array(answer["score"].to_pylist())
    np.testing.assert_allclose(actual, np.take_along_axis(scores, order, 1), rtol=1e-5)


def test_candidates_of_a_model_that_searches_items_are_scored_by_their_vectors(retriever, rows):
    known = retriever.embeddings()["id"].to_pylist()
    listed = [[known[3], 10**9, known[0]], [], *([[known[1]]] * 10)]
    answer = retriever.score(rows.with_columns(candidate_item_id=pl.Series(listed)))
    by_id = dict(zip(known, vectors(retriever.embeddings()), strict=True))
    queries = vectors(retriever.embeddings(rows))
    assert answer["candidate_item_id"].to_pylist() == listed
    scores = answer["score"].to_pylist()
    assert scores[0][1] is None and scores[1] == []
    for row, place in ((0, 0), (0, 2), (5, 0)):
        assert scores[row][place] == pytest.approx(queries[row] @ by_id[listed[row][place]], rel=1e-5)


def test_new_users_and_unknown_items_are_answered(retriever, rows):
    table = rows.head(2).with_columns(
        uih_item_id=pl.Series([[], [10**8, 10**9]]),
        uih_timestamps=pl.Series([[], [1, 2]], dtype=pl.List(pl.Int64)),
    )
    table = table.with_columns(pl.col("uih_item_id").cast(pl.List(pl.Int64)))
    answer = retriever.recommend(table, k=3)
    assert [len(items) for items in answer["item_id"].to_pylist()] == [3, 3]
    assert not vectors(retriever.embeddings(table))[0].any()


def test_answers_follow_the_weights(retriever, rows):
    before = retriever.recommend(rows, k=3)["score"].to_pylist()
    state = {name: tensor.clone() for name, tensor in retriever.module.state_dict().items()}
    recsys.fit(retriever, rows.drop(pl.selectors.starts_with("candidate")), steps=1, progress=False)
    assert retriever.recommend(rows, k=3)["score"].to_pylist() != before
    retriever.module.load_state_dict(state)
    assert retriever.recommend(rows, k=3)["score"].to_pylist() == before


def test_scores_have_the_evaluated_quality(ranker, requests):
    """The area under the curve is the share of pairs of a click and no click in the right order."""
    answer = ranker.score(requests)
    # `max_candidates` of the config cuts rows in evaluation only.
    cut = ranker.config.pipeline.data.max_candidates
    scores = np.array([x for row in answer["is_click"].to_pylist() for x in row[:cut]])
    labels = np.array([x for row in requests["candidate_is_click"].to_pylist() for x in row[:cut]])
    gaps = scores[labels == 1][:, None] - scores[labels == 0][None]
    expected_auc = ((gaps > 0) + 0.5 * (gaps == 0)).mean()
    assert recsys.evaluate(ranker, requests)["is_click/auc"] == pytest.approx(expected_auc, abs=1e-6)


def test_a_model_with_tasks_recommends_the_best_candidates_of_each_row(ranker, requests):
    answer = ranker.recommend(requests, k=2, by="watch_time")
    scored = ranker.score(requests).to_pylist()
    for row, best in zip(scored, answer.to_pylist(), strict=True):
        order = sorted(range(len(row["watch_time"])), key=lambda i: -row["watch_time"][i])[:2]
        assert best["item_id"] == [row["candidate_item_id"][i] for i in order]
        assert best["score"] == [row["watch_time"][i] for i in order]
        assert best["request_id"] == row["request_id"]


def test_the_table_of_a_feature_has_its_ids_and_weights(ranker):
    table = ranker.embeddings(feature="hour")
    ids = pq.read_table(f"{KUAIRAND}/vocabulary/hour.parquet")["id"].to_pylist()
    assert table["id"].to_pylist() == ids
    (weight,) = (w for name, w in ranker.module.state_dict().items() if name.endswith("hour_table.weight"))
    rows = mappings(ranker.config.pipeline)["hour"].map(pa.array(ids))
    np.testing.assert_array_equal(vectors(table), weight.numpy()[rows])


def test_vocabularies_are_counted_as_the_tools_do():
    cfg = recsys.config(RETRIEVER, vocabularies=pq.read_table(f"{MOVIELENS}/train.parquet"))
    counted = read(cfg.pipeline.features[0].id.vocabulary.file)
    written = pq.read_table(f"{MOVIELENS}/vocabulary/item_id.parquet")
    # The tool appends items of the log that no training row has.
    known = [row for row in written.to_pylist() if row["count"]]
    assert counted["count"].to_pylist() == [row["count"] for row in known]
    assert {row["id"]: row["count"] for row in counted.to_pylist()} == {x["id"]: x["count"] for x in known}


def test_ids_of_rows_with_candidates_are_counted_once():
    train = pq.read_table(f"{KUAIRAND}/train.parquet").slice(0, 100)
    text = Path(runs.CONFIG).read_text(encoding="utf-8").replace("vocabulary_dir", "# vocabulary_dir")
    cfg = recsys.config(text, vocabularies=train)
    for feature, nested in (("item_id", 1), ("tag", 2), ("hour", 0)):
        name = feature if feature == "hour" else f"candidate_{feature}"
        expected = Counter(flat(train[name].to_pylist(), nested))
        rest = set() if feature == "hour" else set(flat(train[f"uih_{feature}"].to_pylist(), nested))
        (file,) = (f.id.vocabulary.file for f in cfg.pipeline.features if f.name == feature)
        counted = {row["id"]: row["count"] for row in read(file).to_pylist()}
        assert counted == dict.fromkeys(rest, 0) | expected
        assert list(counted.values()) == sorted(counted.values(), reverse=True)


def test_ids_can_be_listed(rows):
    ids = pa.array([7, 5, 356])
    model = recsys.build(recsys.config(RETRIEVER, vocabularies={"item_id": ids}))
    assert model.embeddings()["id"].to_pylist() == [7, 5, 356]


def test_a_config_can_be_changed_and_printed(retriever):
    changed = recsys.config(retriever.config, ["train.num_steps=7", "model.embedding_dim=4"])
    assert changed.pipeline.train.num_steps == 7
    # What the width decides follows it.
    assert [feature.id.embedding_dim for feature in changed.pipeline.features] == [4]
    assert retriever.config.pipeline.train.num_steps == 1
    assert "embedding_dim: 4  # model.embedding_dim" in str(changed)
    # The text can be read again.
    assert recsys.config(str(changed)).pipeline == changed.pipeline


def test_mistakes_name_what_is_wrong(retriever, ranker, rows, requests, tmp_path):
    no_items = rows.drop("uih_item_id")
    no_ids = no_items.drop("candidate_item_id")
    texts = rows.with_columns(pl.col("uih_item_id").cast(pl.List(pl.String)))
    cases = [
        (
            lambda: recsys.config("model { embeding_dim: 3 }", ["train.x=1"]),
            ConfigError,
            "embeding_dim.*\n.*train.x",
        ),
        (lambda: recsys.config(RETRIEVER), ConfigError, "vocabularies=ROWS"),
        (lambda: recsys.config("nowhere.config"), ConfigError, "nowhere.config: no such file"),
        (lambda: recsys.config(3), ConfigError, "int is given"),
        (lambda: recsys.config(RETRIEVER, vocabularies=no_ids), DataError, "item_id .*to count the ids"),
        (lambda: recsys.build(RETRIEVER), ConfigError, "str is given"),
        (lambda: recsys.batches(no_items, retriever.config), DataError, "no column uih_item_id"),
        (lambda: recsys.batches("test", retriever.config), ConfigError, "data.test"),
        (lambda: recsys.batches({"a": [1, "x"]}, retriever.config), DataError, "cannot be read as a table"),
        (lambda: retriever.recommend(no_items), DataError, "no column uih_item_id"),
        (lambda: retriever.recommend(texts), DataError, "uih_item_id is .*string.*int64"),
        (lambda: retriever.recommend(rows, k=10**6), ConfigError, "k: 1000000 is given; the model knows"),
        (lambda: retriever.recommend(rows, k=0), ConfigError, "k: 0 is given"),
        (lambda: retriever.recommend(rows, by="x"), ConfigError, "by: 'x'"),
        (lambda: retriever.score(rows.drop("candidate_item_id")), DataError, "candidate_item_id"),
        (lambda: ranker.recommend(requests, by="x"), ConfigError, "the tasks are is_click, watch_time"),
        (lambda: ranker.embeddings(), ConfigError, "no vectors of rows and items"),
        (lambda: ranker.embeddings(feature="x"), ConfigError, "item_id, tag, hour"),
        (lambda: recsys.load(tmp_path), RecsysError, "neither a run"),
    ]
    for call, kind, message in cases:
        with pytest.raises(kind, match=f"(?s){message}"):
            call()


def test_no_rows_give_no_answers(retriever, ranker, rows, requests):
    for model, table in ((retriever, rows.head(0)), (ranker, requests.slice(0, 0))):
        assert model.recommend(table, k=3).num_rows == 0
        assert model.score(table).num_rows == 0
    assert retriever.embeddings(rows.head(0)).num_rows == 0


def test_a_log_becomes_rows_and_a_model(tmp_path):
    # Users 0 to 5 take items "i0", "i1", ... in turn, one each day.
    events = pl.DataFrame(
        {
            "who": [user for user in range(6) for _ in range(5)],
            "what": [f"i{(user + step) % 7}" for user in range(6) for step in range(5)],
            "when": pl.Series([86_400 * step + user for user in range(6) for step in range(5)]),
        }
    ).with_columns(pl.from_epoch("when"), kind="kind of " + pl.col("what"))
    data = recsys.prepare_events(events, user="who", item="what", time="when", item_features=["kind"])
    items = data.items.to_pylist()
    assert {row["item_id"]: row["kind"] for row in items} == {f"i{n}": f"kind of i{n}" for n in range(7)}
    assert data.test["candidate_item_id"].to_pylist() == [[f"i{(user + 4) % 7}"] for user in range(6)]
    assert data.validation["candidate_item_id"].to_pylist() == [[f"i{(user + 3) % 7}"] for user in range(6)]
    assert data.train["uih_item_id"].to_pylist() == [[f"i{(u + s) % 7}" for s in range(3)] for u in range(6)]
    assert data.latest["uih_timestamps"].to_pylist()[1] == [86_400 * step + 1 for step in range(5)]
    small = ["model.embedding_dim=8", "train.num_epochs=", "train.num_steps=2", "train.schedule={}"]
    model = recsys.build(recsys.config(data.config, small))
    recsys.fit(model, data.train, validation=data.validation, progress=False)
    unseen = model.recommend(data.latest, k=2).to_pylist()
    assert [set(row["item_id"]) for row in unseen] == [
        {f"i{(user + step) % 7}" for step in (5, 6)} for user in range(6)
    ]
    with pytest.raises(DataError, match="events: no column x; they have who, what, when"):
        recsys.prepare_events(events, user="x", item="what", time="when")
    rated = events.with_columns(rating=pl.Series([step for _ in range(6) for step in range(5)]))
    ranked = recsys.prepare_events(
        rated,
        user="who",
        item="what",
        time="when",
        labels={"liked": "rating>=3"},
        flags=["--session-gap", "1"],
    )
    assert set(ranked.train["candidate_liked"].combine_chunks().flatten().to_pylist()) == {0.0, 1.0}
    with pytest.raises(DataError, match=r"events: no column ratng \(did you mean rating\?\)"):
        recsys.prepare_events(rated, user="who", item="what", time="when", labels={"liked": "ratng"})
    with pytest.raises(ConfigError, match="--nope"):
        recsys.prepare_events(events, user="who", item="what", time="when", flags=["--nope"])


def read(address):
    with fsspec.open(address, "rb") as file:
        return pq.read_table(file)


def flat(values, nested):
    for _ in range(nested):
        values = [value for inner in values for value in inner]
    return values
