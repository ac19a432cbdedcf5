"""Resolved configs are files: a change of a default or of a rule shows as a diff that someone has to want.

After a wanted change: `python scripts/update_golden.py`.
"""

from pathlib import Path

import pytest

from recsys import config
from scripts import update_golden

CONFIGS = update_golden.configs()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_config_resolves_to_its_golden_file(path):
    expected = (update_golden.GOLDEN / path.name).read_text(encoding="utf-8")
    assert update_golden.resolved(path) == expected, "if this is wanted: python scripts/update_golden.py"


def test_no_golden_file_is_left_over():
    assert {path.name for path in update_golden.GOLDEN.iterdir()} == {path.name for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_golden_file_is_a_config_that_resolves_to_itself(path):
    golden = config.load(update_golden.GOLDEN / path.name)
    assert config.resolve(golden, read_files=False).pipeline == golden
    assert config.check(golden) == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_config_starts_with_what_it_is_and_how_to_run_it(path):
    head = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()][0]
    assert head.startswith("#")
    assert f"python -m recsys.train --config configs/{path.name}" in path.read_text(encoding="utf-8")
