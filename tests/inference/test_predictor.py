"""Recommendations of a package, against all scores sorted in Python. The graph is the model itself, not
compiled; `tests/integration` has whole packages."""

import threading
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from recsys import files
from recsys import protos as pb
from recsys.data.schema.vocabulary import mappings
from recsys.data.sources import open_source
from recsys.errors import DataError, RecsysError
from recsys.inference import predictor
from recsys.inference.item_embeddings import catalogue
from recsys.inference.predict_files import _one_ahead, predict
from recsys.inference.predictor import Predictor
from recsys.models import build_model
from tests.modules.pipelines import RETRIEVER, batch_of, pipeline_of, random_row

IDS = [905, 3, 44, 7, 1000, 61, 12, 8, 77, 500, 31, 2, 19, 640, 555, 90, 11, 4, 333, 29]
TOP = 6


@pytest.fixture(params=["REPLICATED", "SHARDED"])
def retriever(request, tmp_path):
    """A package-like object, and the vector of each id."""
    pq.write_table(pa.table({"id": IDS}), tmp_path / "item_id.parquet")
    pipeline = pipeline_of(
        RETRIEVER,
        f'data {{ vocabulary_dir: "{tmp_path}"  key_columns: "user_id" }}',
        f"model {{ embedding {{ placement: {request.param} }} }}",
        f"predict {{ top_k: {TOP}  batch_size: 2 }}",
    )
    model = build_model(pipeline).eval()
    # The same id has the same vector wherever its row is.
    vectors = torch.randn(len(IDS), 8)
    with torch.no_grad():
        rows = torch.from_numpy(mappings(pipeline)["item_id"].map(pa.array(IDS)))
        model.embed.tables["dim_8"].embeddings["item_id_table"].weight[rows] = vectors
    queries = []

    def run(batch):
        with torch.no_grad():
            queries.append(model.score(batch))
        return queries[-1]

    package = SimpleNamespace(
        pipeline=pipeline,
        items=catalogue(model, batch_of(pipeline, [random_row(pipeline, 2, 1)]), pipeline),
        description=SimpleNamespace(outputs=["query"], device="cpu"),
        run=run,
        cached=None,
    )
    unit = vectors / vectors.norm(dim=1, keepdim=True)
    return SimpleNamespace(package=package, vectors=unit.double().numpy(), queries=queries)


def table(*histories: list[int]) -> pa.Table:
    count, lists = len(histories), pa.list_(pa.int64())
    return pa.table(
        {
            "user_id": list(range(count)),
            "request_time": [10_000] * count,
            "uih_item_id": pa.array(histories, lists),
            "uih_timestamps": pa.array([[100 + i for i in range(len(h))] for h in histories], lists),
            "uih_actions": pa.array([[1] * len(h) for h in histories], lists),
        }
    )


def expected(query: np.ndarray, vectors: np.ndarray, seen: list[int]) -> list[int]:
    """Ids by falling score, equal ones as the vocabulary has them, without those of the history."""
    scores = (vectors @ query).round(6)
    order = sorted(range(len(IDS)), key=lambda i: (-scores[i], i))
    return [IDS[i] for i in order if IDS[i] not in seen][:TOP]


def test_recommendations_are_the_best_of_all_ids(retriever):
    # Known and unknown ids, more events than the model reads (6), and a user without a history.
    histories = [[3, 905], [], [29, 7, 7, 123456], [4, 11, 90, 555, 640, 19, 2, 31, 500, 77]]
    actual = Predictor(retriever.package).table(table(*histories)).to_pylist()
    queries = torch.cat(retriever.queries).double().numpy()
    for row, history, query in zip(actual, histories, queries, strict=True):
        assert row["item_id"] == expected(query, retriever.vectors, history)
        assert row["score"] == sorted(row["score"], reverse=True)
    # Nothing is known of this user: all scores are 0, and the most frequent items come first.
    assert actual[1]["item_id"] == IDS[:TOP]


def test_a_table_that_does_not_fit_is_told_by_its_columns(retriever):
    asked = Predictor(retriever.package)
    whole = table([3, 905], [7])
    with pytest.raises(DataError, match=r"^table: no column uih_item_id\."):
        asked.table(whole.drop(["uih_item_id"]))
    wrong = whole.set_column(1, "request_time", pa.array([1.0, 2.0]))
    with pytest.raises(DataError, match="table: column request_time is double; it must be int64 seconds"):
        asked.table(wrong)
    more = whole.append_column("price", pa.array(["a", "b"]))
    assert asked.table(more).equals(asked.table(whole)) and asked.table(whole).num_rows == 2


def test_columns_are_checked_once_although_tables_take_turns(retriever, monkeypatch):
    checked = []
    monkeypatch.setattr(predictor, "check_schema", lambda schema, *rest: checked.append(schema))
    whole, asked = table([3, 905], [7]), Predictor(retriever.package)
    small = whole.set_column(1, "request_time", whole["request_time"].cast(pa.int32()))
    for _ in range(3):
        assert asked.table(whole).equals(asked.table(small))
    assert checked == [whole.schema, small.schema]


def test_an_index_that_looks_everywhere_recommends_the_same(retriever):
    pytest.importorskip("faiss")
    histories = table([3, 905], [], [29, 7, 7, 123456], [4, 11, 90, 555, 640, 19, 2, 31, 500, 77])
    pipeline = pb.Pipeline()
    pipeline.CopyFrom(retriever.package.pipeline)
    pipeline.predict.index.faiss.factory = "Flat"
    pipeline.predict.index.faiss.recall_rows = 2
    exact, indexed = Predictor(retriever.package), Predictor(retriever.package, pipeline)
    expected, actual = exact.table(histories), indexed.table(histories)
    assert actual["item_id"].to_pylist() == expected["item_id"].to_pylist()
    for ours, theirs in zip(actual["score"].to_pylist(), expected["score"].to_pylist(), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)
    assert exact.recall() is None
    # The user without a history is none of the rows that the index serves.
    assert (indexed.recall().recall, indexed.recall().rows) == (1.0, 2)


def test_the_order_of_rows_in_a_table_changes_no_score(retriever):
    scores = Predictor(retriever.package).table(table([3, 44])).to_pylist()[0]
    by_id = dict(zip(IDS, retriever.vectors @ retriever.queries[0][0].double().numpy(), strict=True))
    assert scores["score"] == pytest.approx([by_id[item] for item in scores["item_id"]], abs=1e-5)


@pytest.fixture
def repeated(retriever, tmp_path):
    """A source of two files, in which user 1 stands twice: rows 1 and 4."""
    retriever.package.folder = tmp_path
    (tmp_path / "manifest.json").write_text("{}")
    paths = [str(tmp_path / "rows" / f"{i}.parquet") for i in range(2)]
    (tmp_path / "rows").mkdir()
    pq.write_table(table([3], [44], [7]), paths[0], row_group_size=2)
    pq.write_table(table([905], [44, 7], [29]).slice(0, 2), paths[1])

    def source():
        return open_source(pb.Source(parquet=pb.ParquetSource(paths=paths)), retriever.package.pipeline)

    users = pq.read_table(paths[1])
    pq.write_table(users.set_column(0, "user_id", pa.array([5, 1])), paths[1])
    return SimpleNamespace(package=retriever.package, paths=paths, source=source)


def test_a_key_in_two_files_is_an_error_and_nothing_is_predicted(repeated, tmp_path):
    message = r"1.parquet, row 1: has the same user_id = 1 and request_time = 10000 as .*0.parquet, row 1"
    with pytest.raises(DataError, match=message):
        predict(Predictor(repeated.package), repeated.source(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_later_row_of_a_key_can_be_left_without_a_prediction(repeated, tmp_path):
    repeated.package.pipeline.data.bad_rows.policy = pb.BadRows.SKIP
    made = predict(Predictor(repeated.package), repeated.source(), tmp_path / "out")
    assert (made.rows, made.left_out) == (5, 1)
    actual = [
        row
        for part in sorted((tmp_path / "out").glob("*.parquet"))
        for row in pq.read_table(part).to_pylist()
    ]
    assert [row["user_id"] for row in actual] == [0, 1, 2, 5, 1]
    assert [row["item_id"] is None for row in actual] == [False, False, False, False, True]


def test_a_key_at_two_times_has_two_predictions_and_a_warning(repeated, tmp_path, caplog):
    last = pq.read_table(repeated.paths[1])
    later = pc.add(last["request_time"], pa.array([0, 1]))
    pq.write_table(last.set_column(1, "request_time", later), repeated.paths[1])
    made = predict(Predictor(repeated.package), repeated.source(), tmp_path / "out")
    assert (made.rows, made.left_out) == (5, 0)
    assert "rows with the user_id of an earlier row, at another request_time: 1. " in caplog.text
    caplog.clear()
    pq.write_table(last.slice(0, 1), repeated.paths[1])
    predict(Predictor(repeated.package), repeated.source(), tmp_path / "other")
    assert "another request_time" not in caplog.text


def test_what_came_before_a_bad_row_group_is_written(repeated, tmp_path):
    rows = pq.read_table(repeated.paths[1]).set_column(0, "user_id", pa.array([5, 6])).to_pylist()
    rows[1]["uih_timestamps"] = [1, 2, 3, 4]
    pq.write_table(pa.Table.from_pylist(rows, pq.read_schema(repeated.paths[1])), repeated.paths[1])
    with pytest.raises(DataError, match="1.parquet, row 1"):
        predict(Predictor(repeated.package), repeated.source(), tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "out").glob("*.parquet"))
    assert names == ["part-00000-00000.parquet", "part-00000-00001.parquet"]


def test_what_differs_from_the_predictions_in_a_folder_is_named(repeated, tmp_path):
    pq.write_table(pq.read_table(repeated.paths[1]).slice(0, 1), repeated.paths[1])
    out = tmp_path / "out"
    predict(Predictor(repeated.package), repeated.source(), out)
    predict(Predictor(repeated.package), repeated.source(), out)
    changed = pb.Pipeline()
    changed.CopyFrom(repeated.package.pipeline)
    changed.data.key_columns.append("request_time")
    with pytest.raises(
        RecsysError, match="holds predictions made with a different data.key_columns: give another"
    ):
        predict(Predictor(repeated.package, changed), repeated.source(), out)
    changed.predict.top_k = 2
    pq.write_table(pq.read_table(repeated.paths[0]).slice(0, 1), repeated.paths[0])
    message = "a different setting of `predict` and a different data.key_columns and a different input: give"
    with pytest.raises(RecsysError, match=message):
        predict(Predictor(repeated.package, changed), repeated.source(), out)


def test_a_damaged_part_of_predictions_is_named(repeated, tmp_path):
    pq.write_table(pq.read_table(repeated.paths[1]).slice(0, 1), repeated.paths[1])
    out = tmp_path / "out"
    predict(Predictor(repeated.package), repeated.source(), out)
    part = sorted(out.glob("part-*.parquet"))[0]
    whole = pq.read_table(part)
    pq.write_table(whole.replace_schema_metadata(), part)
    without_count = part.read_bytes()
    for content in (b"", without_count[:-5], without_count):
        part.write_bytes(content)
        with pytest.raises(
            RecsysError, match=f"{part.name}: not a file of predictions .*; remove it and start"
        ):
            predict(Predictor(repeated.package), repeated.source(), out)


def test_two_processes_do_not_write_the_same_predictions(repeated, tmp_path):
    pq.write_table(pq.read_table(repeated.paths[1]).slice(0, 1), repeated.paths[1])
    out = tmp_path / "out"
    out.mkdir()
    with (
        files.locked(out / ".lock") as taken,
        pytest.raises(RecsysError, match="another process predicts into this folder"),
    ):
        assert taken
        predict(Predictor(repeated.package), repeated.source(), out)
    assert [path.name for path in out.iterdir()] == [".lock"]
    assert predict(Predictor(repeated.package), repeated.source(), out).rows == 4


def test_a_folder_of_others_is_left_as_it_is(repeated, tmp_path):
    pq.write_table(pq.read_table(repeated.paths[1]).slice(0, 1), repeated.paths[1])
    for name in ("notes.txt", "part-00000-00000.parquet", ".hidden"):
        folder = tmp_path / name.strip(".")
        folder.mkdir()
        (folder / name).write_text("mine")
        with pytest.raises(RecsysError, match="is not empty and holds no predictions"):
            predict(Predictor(repeated.package), repeated.source(), folder)
        assert [path.name for path in folder.iterdir()] == [name]
    with pytest.raises(RecsysError, match="is a file, and predictions are a folder"):
        predict(Predictor(repeated.package), repeated.source(), tmp_path / "hidden" / ".hidden")


def test_the_next_is_made_while_one_is_used():
    made, second = [], threading.Event()

    def make(number: int) -> int:
        made.append(number)
        if number == 2:
            second.set()
        if number == 4:
            raise DataError("four")
        return number

    used = []
    with pytest.raises(DataError, match="four"):
        for number in _one_ahead(make, [1, 2, 3, 4, 5]):
            if number == 1:
                assert second.wait(60) and 3 not in made
            used.append(number)
    assert used == [1, 2, 3] and made[:4] == [1, 2, 3, 4]
    assert list(_one_ahead(make, [])) == []
