"""Recommendations of a package, against all scores sorted in Python. The graph is the model itself, not
compiled; `tests/integration` has whole packages."""

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recsys import protos as pb
from recsys.data.vocabulary import mappings
from recsys.inference.exporter import catalogue
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
    found = Predictor(retriever.package).table(table(*histories)).to_pylist()
    queries = torch.cat(retriever.queries).double().numpy()
    for row, history, query in zip(found, histories, queries, strict=True):
        assert row["item_id"] == expected(query, retriever.vectors, history)
        assert row["score"] == sorted(row["score"], reverse=True)
    # Nothing is known of this user: all scores are 0, and the most frequent items come first.
    assert found[1]["item_id"] == IDS[:TOP]


def test_an_index_that_looks_everywhere_recommends_the_same(retriever):
    pytest.importorskip("faiss")
    histories = table([3, 905], [], [29, 7, 7, 123456], [4, 11, 90, 555, 640, 19, 2, 31, 500, 77])
    pipeline = pb.Pipeline()
    pipeline.CopyFrom(retriever.package.pipeline)
    pipeline.predict.index.faiss.factory = "Flat"
    pipeline.predict.index.faiss.recall_rows = 2
    exact, indexed = Predictor(retriever.package), Predictor(retriever.package, pipeline)
    expected, found = exact.table(histories), indexed.table(histories)
    assert found["item_id"].to_pylist() == expected["item_id"].to_pylist()
    for ours, theirs in zip(found["score"].to_pylist(), expected["score"].to_pylist(), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)
    assert exact.recall() is None
    # The user without a history is none of the rows that the index serves.
    assert (indexed.recall().recall, indexed.recall().rows) == (1.0, 2)


def test_the_order_of_rows_in_a_table_changes_no_score(retriever):
    scores = Predictor(retriever.package).table(table([3, 44])).to_pylist()[0]
    by_id = dict(zip(IDS, retriever.vectors @ retriever.queries[0][0].double().numpy(), strict=True))
    assert scores["score"] == pytest.approx([by_id[one] for one in scores["item_id"]], abs=1e-5)
