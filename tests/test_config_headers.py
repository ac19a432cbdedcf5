"""Commands in the header comments of configs work, and configs of experiments stay valid."""

import re
from pathlib import Path

import pytest

from recsys import config
from scripts import update_golden

ROOT = Path(__file__).resolve().parent.parent


def suggested(path):
    """Values of `--set` in comments: quoted, or up to the next space."""
    return [
        quoted or plain
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("#")
        for quoted, plain in re.findall(r"--set (?:'([^']*)'|(\S+))", line)
    ]


SUGGESTED = [(path, override) for path in update_golden.configs() for override in suggested(path)]
OF_EXPERIMENTS = sorted((ROOT / "experiments").rglob("*.config"))


def names(value):
    return value.name if isinstance(value, Path) else None


def test_there_are_some():
    assert any("layer_groups[1].tail_len=256" in override for _, override in SUGGESTED) and OF_EXPERIMENTS


@pytest.mark.parametrize(("path", "override"), SUGGESTED, ids=names)
def test_a_suggested_override_changes_the_config(path, override):
    changed = config.prepare(path, [override], read_files=False).pipeline
    assert changed != config.prepare(path, read_files=False).pipeline


@pytest.mark.parametrize("path", OF_EXPERIMENTS, ids=names)
def test_a_config_of_an_experiment_resolves(path):
    assert config.prepare(path, read_files=False).pipeline.model.embedding_dim > 0


@pytest.mark.parametrize("path", [*update_golden.configs(), *OF_EXPERIMENTS], ids=names)
def test_files_that_a_head_names_are_there(path):
    head = [line for line in path.read_text().splitlines() if line.startswith("#")]
    named = re.findall(r"(?:configs|scripts|experiments)/[\w./-]+", "\n".join(head))
    assert named
    for name in named:
        assert (ROOT / name.rstrip(".")).exists(), name
