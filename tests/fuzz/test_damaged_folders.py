"""A small part of `python -m tests.fuzz`: damaged runs and data, read by the commands in this process.

Each case ends with a documented exit code and a short message, and leaves nothing half-written.
"""

import random

import pytest

from tests.fuzz.__main__ import CODES, UNWANTED, message
from tests.fuzz.damage import damage
from tests.fuzz.folders import choose, copy, make


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz") / "ranker"
    make(folder, "ranker", packages=False)
    return folder


def test_an_error_of_the_system_is_a_message_and_a_table_of_metrics_is_none():
    error = "[Errno 13] Permission denied: 'export/package.json'"
    table = "ndcg@10 0.0195\nis_click/auc   0.5\nstep 4"
    assert message(f"12:00:00 INFO reading\n{table}\n{error}") == error


@pytest.mark.parametrize("seed", range(24))
def test_a_damaged_folder_is_an_error_that_is_told(original, tmp_path, monkeypatch, capfd, seed):
    generator = random.Random(seed)
    scenario = choose(generator, "ranker", packages=False)
    copy(original, tmp_path)
    damaged = damage(tmp_path, scenario.parts, generator)
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.rglob("*"))
    try:
        code = scenario.action()
    except SystemExit as end:
        code = end.code
    finally:
        # The system's own cleaning needs the permissions.
        for path in {damaged.path.parent, damaged.path} & before:
            path.chmod(0o700) if not path.is_symlink() else None
    shown = capfd.readouterr()
    case = f"{scenario.name}: {damaged}"
    assert code in CODES, case
    assert not any(text in shown.err for text in UNWANTED), case
    if code:
        assert 0 < len(shown.err + shown.out) < 20_000, case
    assert not [x for x in set(tmp_path.rglob("*")) - before if x.suffix in (".partial", ".old")], case
