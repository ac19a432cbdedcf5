"""A compiled package extends the users of its store, in processes that have nothing else than the package."""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys import files
from tests.integration.runs import ROOT, command, command_in_new_process, train

BLIND = "mask {contextual_reads_history: false}"
GROWS = (
    "train.num_steps=6",
    "model.ranker.preprocessor.contextual.positional={origin: START num_time_buckets: 0}",
    f"model.ranker.mixer={{hstu {{num_heads: 2 qk_dim: 8 layer_groups {{num_layers: 1 {BLIND}}} "
    f"layer_groups {{num_layers: 1 tail_len: 6 {BLIND}}}}}}}",
)
STORE = ("--set", "predict.user_store={}", "--set", "predict.batch_size=1")


def rows_of_a_user(path: Path) -> None:
    """Writes requests of a user whose history grows three times, and then loses its oldest event.

    The numbers of events differ in powers of two, so that the store is used before it is timed.
    """
    table = pq.read_table(ROOT / "tests/data/kuairand/test.parquet")
    row = next(row for row in table.to_pylist() if len(row["uih_item_id"]) > 19 and row["candidate_item_id"])
    rows = []
    for number, (start, stop) in enumerate([(0, 3), (0, 4), (0, 9), (0, 16), (1, 2)]):
        events = {name: values[start:stop] for name, values in row.items() if name.startswith("uih_")}
        rows.append(row | events | {"request_id": number})
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path)


def counted(said: str) -> list[int]:
    """Rows by way: reused, extended, encoded, without."""
    return list(map(int, re.findall(r"(\d+) (?:reused|extended|encoded|without)", said)))


@pytest.mark.slow
def test_a_package_extends_users_and_an_older_one_encodes_them_again(tmp_path):
    run, rows, package = tmp_path / "run", tmp_path / "rows.parquet", tmp_path / "alone" / "export"
    assert train(run, *GROWS) == 0
    rows_of_a_user(rows)
    package.parent.mkdir()
    cached = ("--set", "export.cached_scoring=true")
    command_in_new_process("export", "--run-dir", run, "--output", package, *cached, cwd=ROOT)
    report = json.loads((package / "parity.json").read_text())
    assert report["largest_difference_extended"] <= 1e-5
    given = ("--package", package, "--input", rows, *STORE)
    said = command_in_new_process("predict", *given, "--output", tmp_path / "extended", cwd=package.parent)
    assert counted(said) == [0, 3, 2, 0]

    # What earlier versions wrote.
    (package / "extend.pt2").unlink()
    description = json.loads((package / "package.json").read_text())
    del description["cached"]["extend"]
    for stage in description["cached"]["form"]["stages"]:
        del stage["slides"]
    (package / "package.json").write_text(json.dumps(description))
    files.write_manifest(package)
    said = command_in_new_process("predict", *given, "--output", tmp_path / "encoded", cwd=package.parent)
    assert counted(said) == [0, 0, 5, 0]

    command(
        "predict", "--run-dir", run, "--checkpoint", "best", "--input", rows, "--output", tmp_path / "whole"
    )
    expected = pq.read_table(tmp_path / "whole")
    for output in ("extended", "encoded"):
        actual = pq.read_table(tmp_path / output)
        for name in ("is_click", "watch_time"):
            got, want = (np.array(table[name].to_pylist()) for table in (actual, expected))
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
