"""Searches against all scores sorted in Python."""

import sys

import numpy as np
import pytest
import torch

from recsys import protos as pb
from recsys.errors import ConfigError, InstallationError
from recsys.inference.search import open_search

CPU = torch.device("cpu")
NUM_ITEMS = 400


def settings(**fields) -> pb.Predict:
    """With the defaults of the schema, as in a resolved config."""
    return pb.Predict(index=pb.ItemIndex(faiss=pb.FaissIndex(**{"recall_rows": 256, **fields})))


def truth(queries: np.ndarray, items: np.ndarray, k: int, removed: list[list[int]]) -> list[list[int]]:
    scores = queries.astype(np.float64) @ items.T.astype(np.float64)
    rows = zip(scores, removed, strict=True)
    return [
        sorted((i for i in range(len(items)) if i not in gone), key=lambda i: (-scores[i], i))[:k]
        for scores, gone in rows
    ]


def flat(removed: list[list[int]]) -> dict[str, torch.Tensor]:
    return {
        "removed": torch.tensor([item for row in removed for item in row], dtype=torch.int64),
        "removed_lengths": torch.tensor([len(row) for row in removed], dtype=torch.int64),
    }


@pytest.fixture
def data():
    """Items, queries, and for each query what it must not find: nothing, a few, most of the best."""
    pytest.importorskip("faiss")
    draw = np.random.default_rng(3)
    items = draw.normal(size=(NUM_ITEMS, 8)).astype(np.float32)
    queries = draw.normal(size=(24, 8)).astype(np.float32)
    best = truth(queries, items, 60, [[]] * len(queries))
    removed = [[], [-1, NUM_ITEMS], [5, 5, 7], *(row[: 3 * i] for i, row in enumerate(best[3:]))]
    return torch.from_numpy(items), torch.from_numpy(queries), removed


@pytest.mark.parametrize("index", [None, "Flat", "IVF8,Flat"])
def test_a_search_that_looks_everywhere_is_exact(data, index):
    items, queries, removed = data
    chosen = settings(factory=index, search="nprobe=8" if "IVF" in index else "") if index else pb.Predict()
    search = open_search(chosen, items, CPU)
    actual = search.best(queries, 10, **flat(removed))
    expected = truth(queries.numpy(), items.numpy(), 10, removed)
    assert actual.items.tolist() == expected
    scores = [[float(items[i] @ q) for i in row] for q, row in zip(queries, expected, strict=True)]
    assert actual.scores.tolist() == pytest.approx(np.array(scores), rel=1e-5)
    recall = search.recall()
    assert recall is None if index is None else (recall.recall, recall.rows, recall.k) == (1.0, 24, 10)


@pytest.mark.parametrize(("factory", "search"), [("HNSW4", "efSearch=4"), ("PQ4x4", "")])
def test_what_an_index_finds_is_counted_and_allowed(data, factory, search):
    items, queries, removed = data
    opened = open_search(settings(factory=factory, search=search, recall_rows=20), items, CPU)
    expected = truth(queries.numpy(), items.numpy(), 3, removed)
    hits = 0
    for start in (0, 9, 18):
        part = slice(start, start + 9)
        actual = opened.best(queries[part], 3, **flat(removed[part]))
        for i, (row, scores) in enumerate(
            zip(actual.items.tolist(), actual.scores.tolist(), strict=True), start
        ):
            assert len(set(row)) == 3 and not set(row) & set(removed[i]) and -1 not in row
            assert scores == sorted(scores, reverse=True)
            assert scores == pytest.approx([float(items[item] @ queries[i]) for item in row], rel=1e-5)
            hits += len(set(row) & set(expected[i])) if i < 20 else 0
    recall = opened.recall()
    assert (recall.rows, recall.k, recall.factory, recall.search) == (20, 3, factory, search)
    assert recall.recall == hits / 60 < 1


def test_rows_that_the_index_cannot_serve_are_searched_exactly(data):
    items, queries, removed = data
    queries[4] = 0
    removed[6] = [i for i in range(NUM_ITEMS) if i % 100]  # 4 items are left
    search = open_search(settings(factory="IVF64,Flat"), items, CPU)
    actual = search.best(queries, 30, **flat(removed))
    expected = truth(queries.numpy(), items.numpy(), 30, removed)
    assert actual.items[4].tolist() == expected[4] == [i for i in range(60) if i not in removed[4]][:30]
    assert actual.items[6].tolist() == expected[6] + [-1] * 26
    assert actual.scores[6].tolist()[4:] == [-float("inf")] * 26
    # One of 64 lists has some 6 items, so none has 30: every row is exact.
    assert actual.items.tolist()[7:] == expected[7:]
    assert search.recall().recall is None


def test_no_rows_and_more_items_wanted_than_there_are(data):
    items, queries, _ = data
    search = open_search(settings(factory="Flat"), items[:5], CPU)
    assert search.best(queries[:0], 3, **flat([])).items.shape == (0, 3)
    actual = search.best(queries[:1], 7, **flat([[2]]))
    assert actual.items.tolist() == [truth(queries[:1].numpy(), items[:5].numpy(), 7, [[2]])[0] + [-1] * 3]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"factory": "NoSuchThing"}, "cannot build factory 'NoSuchThing' of 400 items with 8 numbers: "),
        ({"factory": "IVF4096,Flat"}, "should be at least as large as number of clusters"),
        ({"factory": "Flat", "search": "nprobe=3"}, "factory 'Flat' and search 'nprobe=3' of 400 items"),
    ],
)
def test_what_faiss_cannot_build_is_named(data, fields, message):
    with pytest.raises(ConfigError, match="predict.index.faiss: faiss cannot build") as raised:
        open_search(settings(**fields), data[0], CPU)
    assert message in str(raised.value)


def test_without_faiss_the_error_says_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(InstallationError, match="type: python -m pip install faiss-cpu"):
        open_search(settings(), torch.zeros(3, 2), CPU)
