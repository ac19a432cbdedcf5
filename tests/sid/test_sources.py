"""Vectors of items: PPMI and whitening by their definitions, and nothing from behind the training cut."""

import importlib.util
import math
import random
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from recsys.errors import ConfigError, DataError
from recsys.prepare.__main__ import main as prepare_main
from recsys.sid import catalogue, embeddings, sources
from recsys.sid.__main__ import main

# Every worker imports this file, but only one needs scikit-learn, whose import takes two seconds.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None,
    reason="scikit-learn is not installed: pip install -e '.[sid]'",
)


def test_ppmi_is_that_of_a_double_loop():
    generator = random.Random(0)
    histories = [[generator.randrange(-1, 7) for _ in range(generator.randrange(9))] for _ in range(12)]
    counts = np.zeros((8, 8))
    for history in histories:
        for place, first in enumerate(history):
            for second_place, second in enumerate(history):
                if 0 < abs(place - second_place) <= 3 and first != second and first >= 0 and second >= 0:
                    counts[first, second] += 1
    expected = np.zeros((8, 8))
    for i in range(8):
        for j in range(8):
            if counts[i, j]:
                ratio = counts[i, j] * counts.sum() / (counts[i].sum() * counts[j].sum())
                expected[i, j] = max(0.0, math.log(ratio))
    flat = [(item, row) for row, history in enumerate(histories) for item in history]
    items, rows = (np.array(side) for side in zip(*flat, strict=True))
    actual = sources.ppmi(catalogue.Histories(items, rows), 8).toarray()
    assert np.count_nonzero(expected) > 10
    np.testing.assert_allclose(actual, expected, atol=1e-12)


def test_whitened_vectors_have_unit_length_and_uncorrelated_directions_of_equal_variance():
    generator = np.random.default_rng(0)
    vectors = generator.normal(size=(500, 6)) @ generator.normal(size=(6, 6)) + 3
    vectors[7] = 0
    white = sources.Whitening.fit(vectors)
    known = np.delete(vectors, 7, 0)
    projected = (known - white.mean) @ white.components
    np.testing.assert_allclose(np.cov(projected.T, bias=True), np.eye(6), atol=1e-4)
    actual = white.apply(vectors)
    np.testing.assert_allclose(np.linalg.norm(np.delete(actual, 7, 0), axis=1), 1, atol=1e-5)
    assert not actual[7].any(), "an item without a vector stays without one"


def test_a_new_text_gets_the_vector_that_the_fit_would_have_given_it():
    texts = ["red nail polish", "blue nail polish", "hair gel strong", "hair gel red", "strong blue soap", ""]
    terms = sources.TextTerms.fit(texts, seed=0)
    actual = terms.apply(["blue nail polish", "nothing known"])
    np.testing.assert_array_equal(actual[0], terms.apply(texts)[1])
    assert actual[0].any() and not actual[1].any()
    near = terms.apply(texts)[:5] @ terms.apply(["nail polish"]).T
    assert set(np.argsort(-near[:, 0])[:2]) == {0, 1}


def test_a_linear_map_predicts_the_vectors_that_a_source_lacks():
    generator = np.random.default_rng(0)
    known = generator.normal(size=(400, 5)).astype(np.float32)
    true = generator.normal(size=(5, 3))
    wanted = (known @ true).astype(np.float32)
    known[3], wanted[4] = 0, 0
    weights = sources.fit_map(known, wanted)
    both = np.delete(np.arange(400), [3, 4])
    # The normal equations of ridge regression, solved by least squares over rows that stand for the penalty.
    rows, targets = np.concatenate([known[both], np.eye(5)]), np.concatenate([wanted[both], np.zeros((5, 3))])
    np.testing.assert_allclose(weights, np.linalg.lstsq(rows, targets, rcond=None)[0], atol=1e-5)
    predicted = sources.apply_map(known, weights)
    expected = known[4] @ true
    np.testing.assert_allclose(predicted[4], expected / np.linalg.norm(expected), atol=0.02)
    assert not predicted[3].any(), "nothing is predicted from nothing"


def log(path: Path, *, changed: bool) -> Path:
    """A log of 40 users; with `changed` the last two events of each user are of other items."""
    generator, lines = random.Random(1), ["user,item,time,tag"]
    for user in range(40):
        events = [generator.randrange(30) for _ in range(8)]
        if changed:
            events[-2:] = [(item + 11) % 30 for item in events[-2:]]
        lines += [
            f"u{user},i{item:02d},{100 * user + place},tag{item % 5}" for place, item in enumerate(events)
        ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def prepare(folder: Path, name: str, *, changed: bool) -> Path:
    source = log(folder / f"{name}.csv", changed=changed)
    columns = ["--user-column", "user", "--item-column", "item", "--time-column", "time", "--time-unit", "s"]
    flags = ["--input", str(source), "--output", str(folder / name), "--task", "retrieval", *columns]
    assert prepare_main(["csv", *flags, "--item-feature", "tag"]) == 0
    return folder / name


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_events_behind_the_training_cut_change_no_byte(tmp_path):
    """Every validation and test event differs, the training events and the catalogue do not."""
    data = [prepare(tmp_path, name, changed=name == "b") for name in ("a", "b")]
    rows = [{name: pl.concat([pl.read_parquet(p) for p in sorted((folder / name).glob("*.parquet"))])
             for name in ("train", "validation", "test")} for folder in data]  # fmt: skip
    for split in ("validation", "test"):
        pairs = zip(rows[0][split]["candidate_item_id"], rows[1][split]["candidate_item_id"], strict=True)
        assert all(first.to_list() != second.to_list() for first, second in pairs)
    assert rows[0]["train"]["uih_item_id"].to_list() == rows[1]["train"]["uih_item_id"].to_list()
    for folder in data:
        assert main(["embed", "--data", str(folder), "--output", f"{folder}-vectors"]) == 0
    first, second = (contents(Path(f"{folder}-vectors")) for folder in data)
    assert len(first) == 6 and first == second

    # The test can fail: a training event that differs does change the vectors.
    train = next((data[1] / "train").glob("*.parquet"))
    frame = pl.read_parquet(train)
    frame.with_columns(pl.col("uih_item_id").list.reverse().list.head(3)).write_parquet(train)
    assert main(["embed", "--data", str(data[1]), "--output", f"{data[1]}-vectors", "--overwrite"]) == 0
    assert contents(Path(f"{data[1]}-vectors")) != first


def test_items_without_events_get_co_occurrence_as_their_texts_predict_it(tmp_path):
    """An item of the training data and a new one with the same text have the same co-occurrence part."""
    data = prepare(tmp_path, "a", changed=False)
    ids = catalogue.read_ids(data)
    # The text of an item is its tag, and items 0, 5, 10 ... share one; the first loses its events.
    train = next((data / "train").glob("*.parquet"))
    frame = pl.read_parquet(train)
    kept = pl.col("uih_item_id").list.eval(pl.element().filter(pl.element() != ids[0]))
    frame.with_columns(kept).write_parquet(train)
    made = embeddings.embed(data, embeddings.Settings(["text", "cooc"], [1.0, 0.5]), embeddings.ItemTable())
    width = made.transform.whitenings["text"].components.shape[1]
    text, events = made.vectors[:, :width], made.vectors[:, width:]
    np.testing.assert_allclose(np.linalg.norm(events, axis=1), 0.5, atol=1e-5)
    alike = np.flatnonzero((np.abs(text - text[0]) < 1e-6).all(1))
    assert len(alike) > 2
    # Those with the same text have neighbors of their own, which the first item's part is an average of.
    assert (np.abs(events[alike[1:]] - events[0]).max(1) > 1e-3).all()
    assert (events[alike[1:]] @ events[0]).mean() > (events @ events[0]).mean()
    new = made.transform.apply(data, ids, embeddings.ItemTable())
    np.testing.assert_allclose(new[0], made.vectors[0], atol=1e-6)

    embeddings.write_embeddings(tmp_path / "vectors", made)
    again = embeddings.read_embeddings(tmp_path / "vectors").transform
    np.testing.assert_array_equal(again.apply(data, ids, embeddings.ItemTable()), new)


def test_vectors_of_a_file_by_id_and_by_row(tmp_path):
    ids = pl.Series("item_id", [3, 5, 9])
    frame = pl.DataFrame({"item_id": [9, 3], "v": [[1.0, 2.0], [3.0, 4.0]]})
    frame.write_parquet(tmp_path / "v.parquet")
    actual = catalogue.read_vectors(tmp_path / "v.parquet", ids, "item_id")
    assert actual.tolist() == [[3, 4], [0, 0], [1, 2]]
    np.save(tmp_path / "v.npy", np.arange(6).reshape(3, 2))
    assert catalogue.read_vectors(tmp_path / "v.npy", ids, "item_id").tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 2)), r"shape \(2, 2\); expected a row for each of the 3 items"),
        (np.array([[0.0], [np.nan], [1.0]]), "row 1 has a value that is not finite"),
        (np.array([["a"], ["b"], ["c"]]), "expected numbers"),
    ],
)
def test_a_file_of_vectors_that_does_not_fit_is_refused(tmp_path, array, message):
    np.save(tmp_path / "v.npy", array)
    with pytest.raises(DataError, match=message):
        catalogue.read_vectors(tmp_path / "v.npy", pl.Series("item_id", [3, 5, 9]), "item_id")


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (["a", "b"], ConfigError, "'item_id' holds String, the item ids of the data are integers"),
        ([3, None], DataError, "row 1 has no 'item_id'"),
        ([3, 3], DataError, "an item occurs twice"),
    ],
)
def test_ids_that_do_not_fit_are_refused(tmp_path, ids, error, message):
    pl.DataFrame({"item_id": ids, "v": [[1.0], [2.0]]}).write_parquet(tmp_path / "v.parquet")
    with pytest.raises(error, match=message):
        catalogue.read_vectors(tmp_path / "v.parquet", pl.Series("item_id", [3, 5, 9]), "item_id")


def test_texts_follow_the_ids_and_join_columns_and_nested_lists(tmp_path):
    lines = [
        '{"asin": "b", "title": "Soap", "tags": [["Bath", "Body"], ["Gift"]]}',
        '{"asin": "a", "title": ""}',
    ]
    (tmp_path / "items.jsonl").write_text("\n".join(lines), encoding="utf-8")
    ids = pl.Series("item_id", ["a", "b", "c"])
    actual = catalogue.read_texts(tmp_path, ids, tmp_path / "items.jsonl", "asin", ["title", "tags"])
    assert actual == ["", "Soap. Bath Body Gift", ""]
    with pytest.raises(ConfigError, match="no column 'name'; it has asin, title, tags"):
        catalogue.read_texts(tmp_path, ids, tmp_path / "items.jsonl", "asin", ["name"])


def test_data_for_ranking_and_missing_texts_are_refused_with_a_remedy(tmp_path):
    (tmp_path / "schema.json").write_text('{"task": "ranking"}', encoding="utf-8")
    with pytest.raises(ConfigError, match="prepared for ranking.*--task retrieval"):
        catalogue.read_training_histories(tmp_path, pl.Series("item_id", [1]))
    with pytest.raises(ConfigError, match="name an item table with --items"):
        catalogue.read_texts(tmp_path, pl.Series("item_id", [1]), None, "item_id", [])
    with pytest.raises(DataError, match="no such file; .* was not made by `recsys prepare`"):
        catalogue.read_ids(tmp_path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--source", "text", "--source", "text"], "give each source once"),
        (["--source", "text", "--weight", "1", "--weight", "2"], "2 --weight for 1 --source"),
        (["--vectors", "x.npy"], "--vectors has no effect without --source file"),
        (["--source", "cooc", "--text-encoder", "minilm"], "--text-encoder has no effect"),
        (["--source", "cooc", "--items", "x.csv"], "--items has no effect without --source text"),
    ],
)
def test_flags_without_effect_are_errors(tmp_path, capsys, flags, message):
    assert main(["embed", "--data", str(tmp_path), "--output", str(tmp_path / "out"), *flags]) == 2
    assert message in capsys.readouterr().err


def test_an_output_that_holds_an_input_is_refused_before_anything_is_lost(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    flags = ["--data", str(tmp_path / "data"), "--output", str(tmp_path), "--overwrite"]
    assert main(["embed", *flags]) == 2
    assert "holds --data" in capsys.readouterr().err and (tmp_path / "data").is_dir()


def test_a_misspelt_flag_or_tool_is_named(capsys):
    embed = ["embed", "--data", "a", "--output", "b", "--sorce", "text"]
    for arguments, hint in ((embed, "--source"), (["fti"], "fit")):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        assert f"Did you mean {hint}?" in capsys.readouterr().err
