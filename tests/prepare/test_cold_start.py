"""Items held out of training: none of their events is left, and the test rows are theirs."""

import numpy as np
import pyarrow.parquet as pq

from recsys.prepare import __main__ as command
from recsys.sid.catalogue import read_ids
from recsys.sid.embeddings import ItemTable, Settings, embed
from tests.prepare.test_csv import RETRIEVAL, prepare, write


def read(folder, split):
    return [
        row for path in sorted((folder / split).glob("*.parquet")) for row in pq.read_table(path).to_pylist()
    ]


def held_out_of(folder):
    table = pq.read_table(folder / "vocabulary" / "item_id.parquet").to_pylist()
    return {row["id"] for row in table if not row["count"]}


def test_no_event_of_a_held_out_item_is_left_and_test_rows_are_theirs(tmp_path):
    assert prepare(write(tmp_path / "log.csv"), tmp_path / "all", *RETRIEVAL) == 0
    flags = ["cold-start", "--input", str(tmp_path / "all"), "--output", str(tmp_path / "cold")]
    assert command.main([*flags, "--share", "0.2", "--seed", "3"]) == 0
    everything, cold = read_ids(tmp_path / "all"), held_out_of(tmp_path / "cold")
    assert read_ids(tmp_path / "cold").equals(everything) and len(cold) == round(0.2 * len(everything))
    listed = pq.read_table(tmp_path / "cold" / "held_out.parquet")["item_id"].to_pylist()
    assert set(listed) == cold and len(listed) == len(cold)
    removed = 0
    for split in ("train", "validation"):
        expected = []
        for row in read(tmp_path / "all", split):
            if cold & set(row.get("candidate_item_id", [])):
                continue
            kept = [place for place, item in enumerate(row["uih_item_id"]) if item not in cold]
            removed += len(row["uih_item_id"]) - len(kept)
            cut = {name: [row[name][k] for k in kept] for name in row if name.startswith("uih_")}
            expected.append(row | cut)
        assert read(tmp_path / "cold", split) == expected
    whole = read(tmp_path / "all", "test")
    rows = read(tmp_path / "cold", "test")
    assert rows == [row for row in whole if row["candidate_item_id"][0] in cold]
    assert removed and 0 < len(rows) < len(whole)
    assert not (tmp_path / "cold" / "train_validation").exists()


def test_co_occurrence_knows_nothing_of_held_out_items(tmp_path):
    """Their vectors are zero, which is what an item without events has."""
    assert prepare(write(tmp_path / "log.csv"), tmp_path / "all", *RETRIEVAL) == 0
    flags = ["cold-start", "--input", str(tmp_path / "all"), "--output", str(tmp_path / "cold")]
    assert command.main([*flags, "--share", "0.2"]) == 0
    made = embed(
        tmp_path / "cold", Settings(["cooc"], [1.0], "tfidf", 0), ItemTable(None, "item_id", (), None)
    )
    cold = held_out_of(tmp_path / "cold")
    zero = {item for item, vector in zip(made.ids.to_list(), made.vectors, strict=True) if not vector.any()}
    assert cold <= zero and not np.isnan(made.vectors).any() and len(zero) < len(made.ids)


def test_what_cannot_be_held_out_is_said(tmp_path, capsys):
    assert prepare(write(tmp_path / "log.csv"), tmp_path / "all", *RETRIEVAL) == 0
    flags = ["cold-start", "--input", str(tmp_path / "all"), "--output", str(tmp_path / "cold")]
    assert command.main([*flags, "--share", "0.001"]) == 2
    assert "less than one of the" in capsys.readouterr().err
    (tmp_path / "all" / "schema.json").unlink()
    assert command.main(flags) == 3
    assert "no such file" in capsys.readouterr().err
