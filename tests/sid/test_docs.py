"""The commands of docs/semantic-ids.md run on the bundled sample as they stand on the page."""

import shlex
from pathlib import Path

import numpy as np
import pytest

from recsys.sid import bundle
from recsys.sid.__main__ import main
from recsys.sid.embeddings import read_embeddings

ROOT = Path(__file__).resolve().parents[2]
SHORT = {"fit": ["--size", "32"]}
"""Flags that are added to a command to make it short."""


@pytest.mark.slow
def test_the_first_commands_of_the_page_make_a_bundle_and_a_report(tmp_path, monkeypatch, capsys):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install -e '.[sid]'")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    block = (ROOT / "docs/semantic-ids.md").read_text(encoding="utf-8").split("```")[1]
    lines = [shlex.split(line)[2:] for line in block.splitlines() if line.startswith("recsys sid ")]
    assert [line[0] for line in lines] == ["embed", "fit", "report"]
    for line in lines:
        assert main([*line, *SHORT.get(line[0], [])]) == 0, capsys.readouterr().err
    read = bundle.read_bundle(tmp_path / "data/bundle")
    assert len(read.ids) == 9125 and read.about.codes.unique == 1
    assert [level.dead for level in read.about.codes.levels] == [0, 0, 0]
    # The stored transform gives texts the vectors that they had, and predicts co-occurrence.
    like = ["--data", "tests/data/movielens", "--like", "data/bundle", "--output", "data/again"]
    assert main(["embed", *like]) == 0
    first, again = (read_embeddings(tmp_path / f"data/{name}") for name in ("vectors", "again"))
    assert np.array_equal(again.vectors[:, :128], first.vectors[:, :128])
    counted, predicted = first.vectors[:, 128:], again.vectors[:, 128:]
    elsewhere = np.roll(predicted, 1000, axis=0)
    near, anywhere = ((counted * vectors).sum(1).mean() for vectors in (predicted, elsewhere))
    assert near > 2 * abs(anywhere) and not np.array_equal(counted, predicted)
    # Films beside each other in the vectors share a first code far more often than any two do.
    assert read.about.kept.neighbours[0] > 5 * read.about.kept.chance[0]
    assert (tmp_path / "data/bundle-report.html").stat().st_size < 200_000
