"""Train, evaluate, export, predict by the commands on real rows; predictions checked against evaluation and
labels.

Prediction runs in a folder with nothing but the package and the input, so whatever it needs must be in the
package.
"""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from torch._inductor import cpu_vec_isa

import recsys
from recsys import protos as pb
from recsys.errors import ConfigError, DataError
from recsys.inference import exporter
from recsys.inference.golden import golden_inputs, largest_difference
from recsys.inference.package import GOLDEN, Package
from recsys.inference.predictor import Predictor
from recsys.inference.program import PackageError
from recsys.training import checkpoint
from recsys.training.restricted_unpickler import read_chunks
from tests.integration.exports import Exported, TrialHere
from tests.integration.runs import ROOT, command, command_in_new_process, evaluate

TASKS = ("is_click", "long_view", "is_like", "watch_time")
ITEM_TABLE = "embed.tables.dim_50.embeddings.item_id_table.weight"


def predict(package: Path, rows: Path, output: Path, *flags: object) -> pa.Table:
    command("predict", "--package", package, "--input", rows, "--output", output, *flags, cwd=package.parent)
    return pq.read_table(output)


def evaluated(exported: Exported) -> dict[str, float]:
    test = f'data.test={{parquet {{paths: "{exported.rows}"}}}}'
    command("evaluate", "--run-dir", exported.run, "--set", test)
    return json.loads((exported.run / "test_metrics.json").read_text())["metrics"]


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Share of pairs of a positive and a negative in the right order, ties half."""
    difference = scores[labels == 1][:, None] - scores[labels == 0][None, :]
    return float(((difference > 0) + 0.5 * (difference == 0)).mean())


def test_a_rankers_predictions_have_the_evaluated_quality(ranker, tmp_path):
    rows = pq.read_table(ranker.rows)
    flags = ("--package", ranker.package, "--input", ranker.rows, "--output", tmp_path / "out")
    command_in_new_process("predict", *flags, cwd=ranker.package.parent)
    actual = pq.read_table(tmp_path / "out")
    for column in ("user_id", "request_id", "candidate_item_id"):
        assert actual[column].to_pylist() == rows[column].to_pylist()
    metrics = evaluated(ranker)
    clicks = rows["candidate_is_click"].combine_chunks().flatten().to_numpy()
    # The config keeps 10 candidates of a row for evaluation; prediction scores all of them.
    kept = np.concatenate(
        [np.arange(n) < 10 for n in pc.list_value_length(rows["candidate_item_id"]).to_pylist()]
    )
    scores = actual["is_click"].combine_chunks().flatten().to_numpy()
    assert len(scores) == len(clicks)
    assert auc(scores[kept], clicks[kept]) == pytest.approx(metrics["is_click/auc"], abs=1e-5)
    seconds = rows["candidate_watch_time"].combine_chunks().flatten().to_numpy()[kept]
    predicted = actual["watch_time"].combine_chunks().flatten().to_numpy()[kept]
    assert np.abs(predicted - seconds).mean() == pytest.approx(metrics["watch_time/mae"], rel=1e-4)


@pytest.mark.parametrize("family", ["ranker", "retriever"])
def test_a_checkpoint_predicts_like_its_package_without_a_compiler(family, request, tmp_path):
    exported = request.getfixturevalue(family)
    flags = ("--run-dir", exported.run, "--input", exported.rows, "--output", tmp_path / "run")
    said = command("predict", "--checkpoint", "best", *flags, cwd=ROOT, PATH="", CXX="/no/such/g++")
    assert "which is not compiled" in said
    actual = pq.read_table(tmp_path / "run")
    expected = predict(exported.package, exported.rows, tmp_path / "package")
    assert actual.column_names == expected.column_names
    for name in TASKS if family == "ranker" else ("score",):
        ours, theirs = (table[name].combine_chunks().flatten().to_numpy() for table in (actual, expected))
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    said = command("predict", "--checkpoint", "best", "--package", exported.package, code=2)
    assert "--checkpoint: give it with --run-dir, without --package" in said


def test_a_large_table_is_a_file_of_its_own(retriever, tmp_path):
    described = json.loads((retriever.package / "package.json").read_text())
    assert described["tables"] == [{"name": "item_id", "dtype": "float32", "rows": 9126, "width": 50}]
    stored = np.load(retriever.package / "tables" / "item_id.npy")
    (chunk,) = read_chunks(checkpoint.find(retriever.run / "checkpoints", "best"), "model." + ITEM_TABLE)
    assert np.array_equal(stored, chunk[1].numpy())
    assert stored[1:9].tobytes() not in (retriever.package / "model.pt2").read_bytes()


def test_a_package_without_large_tables_is_what_it_was(ranker):
    assert "tables" not in json.loads((ranker.package / "package.json").read_text())
    assert not (ranker.package / "tables").exists()


def test_a_package_has_no_code_of_regular_expressions(ranker):
    """A third of what the compiler had to do, for the name of a device."""
    assert b"regex" not in (ranker.package / "model.pt2").read_bytes()


def test_a_retrievers_predictions_have_the_evaluated_quality(retriever, tmp_path):
    rows = pq.read_table(retriever.rows)
    actual = predict(retriever.package, retriever.rows, tmp_path / "out")
    metrics = evaluated(retriever)
    hits, gains = [], []
    for row, answer in zip(rows.to_pylist(), actual.to_pylist(), strict=True):
        assert answer["user_id"] == row["user_id"]
        assert len(set(answer["item_id"])) == 10
        assert not set(answer["item_id"]) & set(row["uih_item_id"])
        assert answer["score"] == sorted(answer["score"], reverse=True)
        (target,) = row["candidate_item_id"]
        rank = answer["item_id"].index(target) + 1 if target in answer["item_id"] else None
        hits.append(rank is not None)
        gains.append(1 / math.log2(1 + rank) if rank else 0.0)
    assert np.mean(hits) == pytest.approx(metrics["hit_rate@10"], abs=1e-6)
    assert np.mean(gains) == pytest.approx(metrics["ndcg@10"], abs=1e-6)


@pytest.fixture(scope="module")
def repeats(retriever, tmp_path_factory):
    """Rows of which every other one has a target that its user had before, also beyond 200 events."""
    rows = pq.read_table(ROOT / "tests/data/movielens/test.parquet").to_pylist()
    rows.sort(key=lambda row: -len(row["uih_item_id"]))
    rows = rows[:40] + rows[-80:]
    for number, row in enumerate(rows):
        if number % 2:
            row["candidate_item_id"] = [row["uih_item_id"][0 if number % 4 == 1 else -1]]
    path = tmp_path_factory.mktemp("repeats") / "rows.parquet"
    schema = pq.read_schema(ROOT / "tests/data/movielens/test.parquet")
    pq.write_table(pa.Table.from_pylist(rows, schema), path)
    return path


def test_a_package_warms_up_with_its_stored_rows_as_it_scores_requests(ranker, monkeypatch):
    """A GPU records a size when it comes for the second time."""
    package = Package(ranker.package)
    run, calls = package._run, []
    monkeypatch.setattr(package, "_run", lambda inputs: calls.append((inputs, run(inputs))))
    package.warm_up()
    stored = load_file(ranker.package / GOLDEN)
    assert len(calls) == 2
    for inputs, (output,) in calls:
        assert all(map(torch.equal, inputs, golden_inputs(stored)))
        assert largest_difference(output, stored["output"]) <= package.description.tolerance

    def fails(inputs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nand more")

    monkeypatch.setattr(package, "_run", fails)
    with pytest.raises(PackageError, match=r"stored rows \(CUDA out of memory\. Tried .*\)$"):
        package.warm_up()


@pytest.mark.parametrize(
    ("seen", "remove_history", "left_out"),
    [("REMOVE", True, False), ("REMOVE", True, True), ("KEEP", False, False)],
)
def test_evaluation_says_what_predictions_find_where_users_repeat_items(
    retriever, repeats, seen, remove_history, left_out
):
    """HR@10 and NDCG@10 from the lists of ten items, against the metrics of `recsys.evaluate`."""
    package = Package(retriever.package)
    pipeline = pb.Pipeline()
    pipeline.CopyFrom(package.pipeline)
    pipeline.predict.remove_history = remove_history
    rows = pq.read_table(repeats)
    lists = Predictor(package, pipeline).table(rows)["item_id"].to_pylist()
    gains, repeated = [], 0
    for row, items in zip(rows.to_pylist(), lists, strict=True):
        (target,) = row["candidate_item_id"]
        known = target in row["uih_item_id"]
        repeated += known
        if not (known and left_out):
            gains.append(1 / math.log2(2 + items.index(target)) if target in items else 0.0)
    assert repeated >= 60
    choices = [f"model.retriever.seen={seen}", "model.retriever.metrics=[{hit_rate {}}, {ndcg {}}]"]
    choices += [f"model.retriever.repeated_targets={'LEAVE_OUT' if left_out else 'MISS'}"]
    choices += [f'data.test={{parquet {{paths: "{repeats}"}}}}']
    flags = [part for choice in choices for part in ("--set", choice)]
    assert evaluate("--run-dir", str(retriever.run), *flags) == 0
    written = json.loads((retriever.run / "test_metrics.json").read_text())
    assert written["metrics"]["ndcg@10"] == pytest.approx(np.mean(gains), abs=1e-6)
    assert written["metrics"]["hit_rate@10"] == pytest.approx(np.mean(np.array(gains) > 0), abs=1e-6)
    assert written["repeated_targets"] == (repeated if seen == "REMOVE" else 0)
    # An untrained query is close to its last event, so only KEEP finds repeats.
    assert seen == "REMOVE" or np.mean(np.array(gains)[1::2] > 0) > np.mean(np.array(gains)[::2] > 0)


@pytest.mark.parametrize("family", ["ranker", "retriever"])
def test_the_library_answers_alike_for_a_run_and_its_package(family, request, monkeypatch):
    monkeypatch.chdir(ROOT)
    exported = request.getfixturevalue(family)
    run, package = recsys.load(exported.run), recsys.load(exported.package)
    table = pq.read_table(exported.rows).slice(0, 200)
    answers = [model.score(table).to_pydict() for model in (run, package)]
    assert answers[0].keys() == answers[1].keys()
    compared = [name for name, values in answers[0].items() if isinstance(values[0], list)]
    for name in compared:
        ours, theirs = ([x for row in answer[name] for x in row] for answer in answers)
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    if family == "retriever":
        # Items whose scores nearly agree may change places; the scores in falling order may not.
        best = [model.recommend(table, k=5)["score"].to_pylist() for model in (run, package)]
        for ours, theirs in zip(*best, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
        assert run.embeddings()["id"].to_pylist() == package.embeddings()["id"].to_pylist()
    expected, measured = recsys.evaluate(run, table), recsys.evaluate(package, table)
    assert measured and measured.keys() == {name for name in expected if name.partition("/")[0] != "loss"}
    for name, value in measured.items():
        assert value == pytest.approx(expected[name], abs=2e-5, rel=2e-5, nan_ok=True)
    with pytest.raises(ConfigError, match="a package is compiled to predict and cannot be trained"):
        recsys.fit(package, table)


def test_top_k_and_history_can_be_chosen(retriever, tmp_path):
    ten = predict(retriever.package, retriever.rows, tmp_path / "ten")
    three = predict(retriever.package, retriever.rows, tmp_path / "three", "--set", "predict.top_k=3")
    assert three["item_id"].to_pylist() == [items[:3] for items in ten["item_id"].to_pylist()]
    kept = predict(
        retriever.package, retriever.rows, tmp_path / "kept", "--set", "predict.remove_history=false"
    )
    histories = pq.read_table(retriever.rows)["uih_item_id"].to_pylist()
    seen = [
        set(items) & set(history)
        for items, history in zip(kept["item_id"].to_pylist(), histories, strict=True)
    ]
    assert any(seen)


def test_an_index_says_how_much_it_finds(retriever, tmp_path):
    pytest.importorskip("faiss")
    flags = ("--package", retriever.package, "--input", retriever.rows, "--set")
    index = 'predict.index={faiss {factory: "IVF64,Flat" search: "nprobe=8" recall_rows: 90}}'
    said = command("predict", *flags, index, "--output", tmp_path / "index", cwd=tmp_path)
    actual = pq.read_table(tmp_path / "index")["item_id"].to_pylist()
    exact = predict(retriever.package, retriever.rows, tmp_path / "exact")["item_id"].to_pylist()
    recall = json.loads((tmp_path / "index" / "_index.json").read_text())
    assert (recall["factory"], recall["k"], recall["rows"]) == ("IVF64,Flat", 10, 90)
    assert f"index IVF64,Flat found {100 * recall['recall']:.2f} % of the exact top 10 of 90 rows" in said
    hits = [len(set(ours) & set(theirs)) for ours, theirs in zip(actual, exact, strict=True)]
    assert recall["recall"] == pytest.approx(np.mean(hits[:90]) / 10, abs=0.02)
    assert all(len(set(items)) == 10 for items in actual)


def test_unknown_users_items_and_empty_lists_are_scored(ranker, tmp_path):
    rows = pq.read_table(ranker.rows).slice(0, 4).to_pylist()
    rows[0] |= {
        "user_id": 10**15,
        "candidate_item_id": [-0 + 10**14 + i for i in range(len(rows[0]["candidate_item_id"]))],
    }
    for name in [name for name in rows[1] if name.startswith("uih_")]:
        rows[1][name] = []
    for name in [name for name in rows[2] if name.startswith("candidate_")]:
        rows[2][name] = []
    path = tmp_path / "odd.parquet"
    pq.write_table(pa.Table.from_pylist(rows, pq.read_schema(ranker.rows)), path)
    actual = predict(ranker.package, path, tmp_path / "out").to_pylist()
    assert [len(row["is_click"]) for row in actual] == [len(row["candidate_item_id"]) for row in rows]
    assert actual[2]["is_click"] == []
    assert all(0 < p < 1 for row in actual for p in row["is_click"])
    assert all(math.isfinite(s) for row in actual for s in row["watch_time"])


def test_new_users_get_recommendations(retriever, tmp_path):
    rows = pq.read_table(retriever.rows).slice(0, 2).to_pylist()
    for name in [name for name in rows[0] if name.startswith("uih_")]:
        rows[0][name] = []
    rows[1]["uih_item_id"] = [10**12 + i for i in range(len(rows[1]["uih_item_id"]))]
    path = tmp_path / "new.csv"
    columns = ("user_id", "request_time", "uih_item_id", "uih_timestamps")
    lines = [",".join(columns)]
    for row in rows:
        cells = [row[name] if isinstance(row[name], list) else [row[name]] for name in columns]
        lines.append(",".join("|".join(map(str, cell)) for cell in cells))
    path.write_text("\n".join(lines) + "\n")
    actual = predict(retriever.package, path, tmp_path / "out").to_pylist()
    assert [len(set(row["item_id"])) for row in actual] == [10, 10]
    assert all(math.isfinite(s) for row in actual for s in row["score"])


def test_thousands_of_candidates_are_scored_as_they_would_be_alone(ranker, tmp_path):
    rows = pq.read_table(ranker.rows)
    lists = [name for name in rows.column_names if name.startswith("candidate_")]
    row = rows.slice(0, 1).to_pylist()[0]
    pool = rows.slice(0, 1300).to_pylist()
    for name in lists:
        row[name] = [value for donor in pool for value in donor[name]]
    row["candidate_timestamps"] = [row["request_time"]] * len(row["candidate_item_id"])
    count = len(row["candidate_item_id"])
    assert count > 1024
    alone = [row | {name: [row[name][i]] for name in lists} | {"request_id": i} for i in range(0, count, 97)]
    path = tmp_path / "many.parquet"
    pq.write_table(pa.Table.from_pylist([row, *alone], rows.schema), path)
    actual = predict(ranker.package, path, tmp_path / "out").to_pylist()
    assert len(actual[0]["is_click"]) == count
    for i, single in zip(range(0, count, 97), actual[1:], strict=True):
        assert single["is_click"] == pytest.approx([actual[0]["is_click"][i]], abs=1e-5)


def test_a_bad_row_is_named_or_left_out(ranker, tmp_path):
    rows = pq.read_table(ranker.rows).slice(0, 3).to_pylist()
    rows[1]["uih_item_id"] = [*rows[1]["uih_item_id"], 7]
    path = tmp_path / "bad.parquet"
    pq.write_table(pa.Table.from_pylist(rows, pq.read_schema(ranker.rows)), path)
    flags = ("--package", ranker.package, "--input", path)
    said = command("predict", *flags, "--output", tmp_path / "a", code=3)
    assert f"{path}, row 1" in said and "uih_item_id" in said
    assert not list((tmp_path / "a").glob("*.parquet")) and not (tmp_path / "a" / "_SUCCESS").exists()
    # The same folder: nothing of the call that failed stands in the way, not even after a change of the file.
    pq.write_table(pa.Table.from_pylist(rows, pq.read_schema(ranker.rows)), path, compression="none")
    actual = predict(
        ranker.package, path, tmp_path / "a", "--set", "data.bad_rows={policy: SKIP}"
    ).to_pylist()
    assert [row["is_click"] is None for row in actual] == [False, True, False]
    assert [row["request_id"] for row in actual] == [row["request_id"] for row in rows]
    assert json.loads((tmp_path / "a" / "_SUCCESS").read_text()) == {"rows": 3, "left_out": 1}


def test_an_interrupted_prediction_goes_on_and_another_one_is_refused(ranker, tmp_path):
    output = tmp_path / "out"
    whole = predict(ranker.package, ranker.rows, output)
    parts = sorted(output.glob("part-*.parquet"))
    kept = parts[0].stat().st_mtime_ns
    for part in parts[1::2]:
        part.unlink()
    (output / "_SUCCESS").unlink()
    assert predict(ranker.package, ranker.rows, output).equals(whole)
    assert parts[0].stat().st_mtime_ns == kept
    flags = ("--package", ranker.package, "--input", ranker.rows, "--output")
    said = command("predict", *flags, output, "--set", "predict.batch_size=7", code=1)
    assert (
        f"{output} holds predictions made with a different setting of `predict`: give another --output"
        in said
    )
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    assert "is not empty" in command("predict", *flags, tmp_path / "full", code=1)


def test_wrong_calls_say_what_to_do(ranker, tmp_path):
    assert "--package: not given" in command("predict", code=2)
    assert "only predict" in command(
        "predict", "--package", ranker.package, "--set", "model.embedding_dim=8", code=2
    )
    assert "carries its own config" in command(
        "predict", "--package", ranker.package, "--config", "x.config", code=2
    )
    without_rows = ("--package", ranker.package, "--set", "data.test=", "--output", tmp_path / "o")
    said = command("predict", *without_rows, code=2)
    assert "--input: not given, and the package's config has no data.test" in said
    said = command("predict", "--package", tmp_path, "--input", ranker.rows, code=2)
    assert f"{tmp_path}: there is no package here" in said and "python -m recsys.export" in said
    assert "no such file" in command(
        "predict",
        "--package",
        ranker.package,
        "--input",
        tmp_path / "no.parquet",
        "--output",
        tmp_path / "o",
        code=3,
    )


@pytest.mark.parametrize(
    "name", ["model.pt2", "golden.safetensors", "vocabulary/item_id.parquet", "package.json"]
)
def test_a_damaged_package_is_refused_by_name(ranker, tmp_path, name):
    damaged = tmp_path / "export"
    shutil.copytree(ranker.package, damaged)
    content = bytearray((damaged / name).read_bytes())
    content[len(content) // 2] ^= 1
    (damaged / name).write_bytes(content)
    said = command(
        "predict", "--package", damaged, "--input", ranker.rows, "--output", tmp_path / "o", code=1
    )
    assert f"{damaged / name}: its bytes differ" in said
    assert not (tmp_path / "o").exists()


def test_a_package_has_the_vectors_of_all_items_and_makes_those_of_new_ones(retriever):
    actual = pq.read_table(retriever.package / "item_embeddings.parquet")
    listed = pq.read_table(ROOT / "tests/data/movielens/vocabulary/item_id.parquet")["id"]
    assert actual["id"].to_pylist() == listed.to_pylist()
    vectors = np.stack(actual["vector"].to_numpy())
    assert vectors.dtype == np.float32 and vectors.shape == (len(listed), 50)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    package = Package(retriever.package)
    described = pq.read_table(ROOT / "tests/data/movielens/items.parquet")
    place = {item: number for number, item in enumerate(listed.to_pylist())}
    order = [place[item] for item in described["item_id"].to_pylist()]
    np.testing.assert_allclose(package.item_vectors(described).numpy(), vectors[order], atol=1e-5)
    new = pa.table({"item_id": [10**9, 10**9], "genres": [["Comedy"], []], "year": [1994, None]})
    made = package.item_vectors(new).numpy()
    np.testing.assert_allclose(np.linalg.norm(made, axis=1), 1, rtol=1e-5)
    assert not np.allclose(made[0], made[1])
    with pytest.raises(DataError, match="items: no column year"):
        package.item_vectors(new.drop(["year"]))


def test_a_package_can_be_read_by_whoever_may_read_its_folder(retriever):
    beside = retriever.run / "config.resolved"
    modes = {path.name: path.stat().st_mode for path in retriever.package.rglob("*") if path.is_file()}
    assert set(modes.values()) == {beside.stat().st_mode}, modes


def test_a_load_tries_no_instruction_set(ranker, monkeypatch):
    """PyTorch would compile and run a program for each one that the processor has: here all of them."""
    tried = []
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", lambda self, code: tried.append(self))
    for name in ("avx512", "avx512_bf16", "vnni", "amx_tile"):
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda: True)
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    Package(ranker.package)
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    assert tried == []


def test_a_package_that_differs_from_the_model_is_not_written(ranker, tmp_path, monkeypatch):
    def compile_graph(graph, specs, inputs, path, *rest):
        """The compiler would make the same program once more."""
        shutil.copyfile(ranker.package / path.name, path)
        return True

    monkeypatch.setattr(exporter, "compile_graph", compile_graph)
    monkeypatch.setattr(exporter, "Trial", TrialHere)
    # The package is equal to some 1e-8; nothing is equal to 0 for hundreds of numbers.
    flags = (
        "--run-dir",
        ranker.run,
        "--output",
        tmp_path / "export",
        "--set",
        "export.parity_tolerance=1e-30",
    )
    said = command("export", *flags, code=1)
    assert "differ" in said and "Nothing was exported" in said
    assert list(tmp_path.iterdir()) == []


def test_a_missing_compiler_is_named_with_its_remedy(ranker, tmp_path):
    said = command("export", "--run-dir", ranker.run, "--output", tmp_path / "e", code=5, CXX="/no/such/g++")
    assert "C++ compiler" in said and "apt-get install" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_with_a_cache_predictions_are_the_same(ranker, tmp_path):
    """Compiled, with rows that share a prefill, and a list of candidates that is cut into microbatches."""
    package = tmp_path / "alone" / "export"
    package.parent.mkdir()
    flags = ("--run-dir", ranker.run, "--output", package, "--set", "export.cached_scoring=true")
    said = command("export", *flags).strip().splitlines()
    assert all(" INFO " in line for line in said), said
    report = json.loads((package / "parity.json").read_text())
    assert report["largest_difference_cached"] <= report["allowed"]
    described = json.loads((package / "package.json").read_text())
    assert {"prefill", "cached", "form"} == set(described["cached"])

    rows = pq.read_table(ranker.rows)
    lists = [name for name in rows.column_names if name.startswith("candidate_")]
    long, pool = rows.slice(3, 1).to_pylist()[0], rows.slice(0, 1000).to_pylist()
    for name in lists:
        long[name] = [value for donor in pool for value in donor[name]]
    long["candidate_timestamps"] = [long["request_time"]] * len(long["candidate_item_id"])
    long["request_id"] = 70
    parts = [
        long | {name: long[name][n : n + 7] for name in lists} | {"request_id": n} for n in range(0, 70, 7)
    ]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([*rows.slice(0, 50).to_pylist(), *parts, long], rows.schema), path)
    few = ("--set", "predict.candidates_per_microbatch=128", "--set", "predict.batch_size=16")
    actual = predict(package, path, tmp_path / "cached", *few)
    expected = predict(ranker.package, path, tmp_path / "whole")
    for name in expected.column_names:
        for got, want in zip(actual[name].to_pylist(), expected[name].to_pylist(), strict=True):
            if name == "watch_time":  # the model computes its logarithm
                got, want = np.log1p(got), np.log1p(want)
            assert got == (pytest.approx(want, abs=1e-5) if name in TASKS else want)
    damaged = bytearray((package / "weights.safetensors").read_bytes())
    damaged[-1] ^= 1
    (package / "weights.safetensors").write_bytes(damaged)
    flags = ("--package", package, "--input", path, "--output", tmp_path / "o")
    assert "weights.safetensors: its bytes differ" in command("predict", *flags, code=1)
