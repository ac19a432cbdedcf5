"""`recsys init`: what it writes is complete and right, and it changes nothing that exists."""

import re
import shlex
from pathlib import Path

import polars as pl
import pytest

from recsys import __main__ as console
from recsys import init, resources
from recsys.prepare import csv

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("init") / "my project"
    assert init.main([str(folder)]) == 0
    return folder


def commands(text):
    """The flags of each command that stands on lines of its own."""
    return [
        shlex.split(line) for line in re.findall(r"^recsys (.*)", text.replace("\\\n", " "), re.MULTILINE)
    ]


def test_the_sample_has_the_events_of_the_test_data():
    splits = ("train", "validation", "test")
    rows = pl.concat(pl.read_parquet(ROOT / f"tests/data/kuairand/{split}.parquet") for split in splits)
    clicks = rows.select(pl.col("candidate_is_click").explode()).to_series()
    sample = pl.read_csv(resources.SAMPLE / "events.csv")
    assert (len(sample), sample["is_click"].sum()) == (len(clicks), clicks.sum())
    assert set(sample["user_id"]) == set(rows["user_id"])
    assert (resources.SAMPLE / "LICENSE").read_bytes() == (ROOT / "tests/data/kuairand/LICENSE").read_bytes()


def test_the_project_has_the_data_its_licence_and_a_config_that_is_right(project, monkeypatch, capsys):
    assert (project / "LICENSE").exists() and (project / "SOURCE.md").exists()
    splits = pl.concat(pl.read_parquet(project / "sample" / name) for name in ("train", "validation", "test"))
    assert splits["candidate_item_id"].list.len().sum() == len(pl.read_csv(project / "events.csv"))
    monkeypatch.chdir(project)
    assert console.main(["train", "--config", "sample/starter.config", "--validate"]) == 0
    assert capsys.readouterr().out == "ok\n"


def test_the_commands_of_its_readme_are_those_that_exist(project, monkeypatch):
    lines = commands((project / "README.md").read_text(encoding="utf-8"))
    assert [line[0] for line in lines] == ["train", "evaluate", "export", "predict", "prepare"]
    for line in lines[:4]:
        with pytest.raises(SystemExit, match="0"):
            console.main([*line, "--help"])
    # The last one makes the same data again.
    monkeypatch.chdir(project)
    flags = lines[4][2:]
    flags[flags.index("sample")] = "again"
    csv.main(flags)
    for file in (project / "sample").rglob("*.parquet"):
        again = project / "again" / file.relative_to(project / "sample")
        assert pl.read_parquet(again).equals(pl.read_parquet(file))


def test_it_never_writes_into_a_folder_that_has_something_in_it(tmp_path, capsys):
    (tmp_path / "mine").write_text("mine")
    assert init.main([str(tmp_path)]) == 2
    assert "nothing was changed" in capsys.readouterr().err
    assert init.main([str(tmp_path / "mine")]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(init.csv, "main", full)
    assert init.main([str(tmp_path / "project")]) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_ready_config_comes_with_commands_for_its_new_place(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "ml"
    assert init.main([str(folder), "--config", "ml_1m_hstu"]) == 0
    text = (folder / "ml_1m_hstu.config").read_text(encoding="utf-8")
    assert "configs/" not in text
    assert "--config ml_1m_hstu.config" in text
    monkeypatch.chdir(folder)
    # The user makes the data first; the message says so.
    assert console.main(["train", "--config", "ml_1m_hstu.config", "--validate"]) == 2
    assert "python -m recsys.prepare" in capsys.readouterr().err


def test_an_unknown_ready_config_is_answered_with_the_known_ones(tmp_path, capsys):
    assert init.main([str(tmp_path / "x"), "--config", "ml_1m_hstuu"]) == 2
    said = capsys.readouterr().err
    assert "Did you mean ml_1m_hstu?" in said and "kuairand_ranking" in said
    # It would find no data: the test data is not in a wheel.
    assert "quickstart" not in said and list(tmp_path.iterdir()) == []
