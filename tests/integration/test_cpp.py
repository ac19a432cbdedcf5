"""The C++ example, built with CMake against this torch: its scores equal those of `recsys predict`."""

import json
import runpy
import shutil
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recsys.inference.package import Package
from tests.integration.runs import ROOT, command, one_thread

EXAMPLE = ROOT / "examples/cpp"

NO_COMPILER = not shutil.which("cmake") or not shutil.which("g++")

KINDS = {
    "ids": {"item_id", "tag", "upload_type", "tab", "hour", "user_active_degree"},
    "counts": {"tag"},
    "reals": {"duration", "watch_time"},
    "integers": {"timestamps", "actions", "request_time"},
}
"""The columns of the config by the form of their values, without the prefixes of sides."""


def run(*words: object, stdin: str = "", code: int = 0) -> str:
    """Runs a program, checks its exit code, and returns stdout, or stderr if it should fail."""
    environment = one_thread() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [str(word) for word in words],
        input=stdin,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else done.stdout


@pytest.fixture(scope="module", params=[pytest.param(None, marks=pytest.mark.slow)])
def program(tmp_path_factory) -> Path:
    if NO_COMPILER:
        pytest.skip("needs cmake and g++")
    build = tmp_path_factory.mktemp("build")
    run("cmake", "-S", EXAMPLE, "-B", build, f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}")
    run("cmake", "--build", build)
    return build / "score"


@pytest.fixture(scope="module")
def folder(ranker, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cpp")
    runpy.run_path(str(EXAMPLE / "prepare.py"))["main"](ranker.package, folder)
    return folder


def test_a_recipe_says_how_each_input_is_made(folder, ranker):
    recipe = json.loads((folder / "recipe.json").read_text())
    assert len(recipe["inputs"]) == len(Package(ranker.package).description.inputs)
    made: dict[str, set[str]] = {kind: set() for kind in KINDS}
    for entry in recipe["inputs"]:
        if entry["kind"] in made:
            made[entry["kind"]].add(entry["column"].removeprefix("uih_").removeprefix("candidate_"))
            if entry["kind"] == "ids":
                assert (folder / f"{entry['table']}.ids").read_text().count("\n") > 0
    assert made == KINDS
    (duration,) = (entry for entry in recipe["inputs"] if entry.get("column") == "uih_duration")
    assert (duration["mean"], duration["std"], duration["log1p"]) == (4.13, 1.17, True)
    assert (recipe["max_history"], recipe["num_contextual"]) == (50, 3)


def test_scores_equal_those_of_predict(program, folder, ranker, tmp_path):
    rows = pq.read_table(ranker.rows).slice(0, 300).to_pylist()
    lists = [name for name in rows[0] if name.startswith(("uih_", "candidate_"))]
    rows[3] |= {name: [] for name in lists if name.startswith("uih_")}
    rows[5] |= {name: [] for name in lists if name.startswith("candidate_")}
    rows[8]["candidate_item_id"] = [10**15 + n for n in range(len(rows[8]["candidate_item_id"]))]
    # More events than the model reads: the oldest ones are left out.
    rows[9] |= {name: 9 * rows[9][name] for name in lists if name.startswith("uih_")}
    rows[9]["uih_timestamps"] = sorted(rows[9]["uih_timestamps"])
    assert len(rows[9]["uih_timestamps"]) > 50
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows, pq.read_schema(ranker.rows)), path)
    command("predict", "--package", ranker.package, "--input", path, "--output", tmp_path / "out")
    expected = pq.read_table(tmp_path / "out").to_pylist()
    said = run(program, folder, 3, stdin="".join(json.dumps(row) + "\n" for row in rows))
    scored = [json.loads(line) for line in said.splitlines()]
    assert len(scored) == len(expected) == 300
    for mine, theirs in zip(scored, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            close = name in ("is_click", "long_view", "is_like", "watch_time")
            assert mine[name] == (pytest.approx(theirs[name], rel=1e-6, abs=1e-6) if close else theirs[name])


def test_a_line_that_does_not_fit_is_named(program, folder, ranker):
    row = pq.read_table(ranker.rows).slice(0, 1).to_pylist()[0]
    ragged = row | {"uih_item_id": [*row["uih_item_id"], 7]}
    lines = [json.dumps(row), json.dumps(ragged)]
    said = run(program, folder, stdin="\n".join(lines) + "\n", code=1)
    expected = f"line 2: uih_item_id: expected a list of {len(row['uih_item_id'])} values"
    assert said.strip() == f"error: {expected}"
    for text, what in (
        ('{"a": [1, 2}', "JSON: expected ] at character 11"),
        ("[" * 100, "JSON: nested too deeply at character 65"),
        (json.dumps(row | {"hour": None})[:-1], "JSON: expected }"),
        (json.dumps(row | {"request_time": 1.5}), "expected a 64-bit integer"),
        (json.dumps({}), "no field uih_timestamps"),
    ):
        assert f"error: line 1: {what}" in run(program, folder, stdin=text, code=1)


def test_ids_may_be_any_text(program, tmp_path, folder, ranker):
    """The hour of a row gets other names, with escapes and characters beyond the basic plane."""
    names = ['a quote "', "a back\\slash", "\u00fc\u20ac\U0001f600", "a tab\tin it"]
    row = pq.read_table(ranker.rows).slice(0, 1).to_pylist()[0]
    renamed = tmp_path / "renamed"
    shutil.copytree(folder, renamed)
    hours = dict(line.split("\t")[::-1] for line in (folder / "hour.ids").read_text().splitlines())
    with (renamed / "hour.ids").open("a", encoding="utf-8") as file:
        file.writelines(f"{hours[str(row['hour'])]}\t{name}\n" for name in names)
    rows = [row, *(row | {"hour": name} for name in names), row | {"hour": "unknown"}]
    lines = [json.dumps(row, ensure_ascii=ascii) for ascii in (True, False) for row in rows]
    # Each row is a batch of its own, so that equal rows are summed in the same order.
    scores = [json.loads(run(program, renamed, stdin=line))["is_click"] for line in lines]
    assert scores == 2 * ([scores[0]] * 5 + [scores[5]])
    assert scores[0] != scores[5]
