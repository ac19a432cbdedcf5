"""A config from file to checked and resolved. Texts: tests in `textproto`; absent values: `test_resolve`."""

import subprocess
import sys

import pytest

from recsys import config
from tests.config_texts import RANKER, RETRIEVER, findings


@pytest.mark.parametrize("text", [RANKER, RETRIEVER])
def test_examples_are_valid(write, text):
    ready = config.prepare(write(text), read_files=False)
    assert ready.warnings == []


def test_mistakes_in_the_text_do_not_hide_those_in_its_meaning(write):
    overrides = ["data.bath_size=4", "train.num_steps=x", "model.ranker.tasks[0].metrics=[{ndcg {}}]"]
    overrides += ["model.ranker.mixer.hstu.num_heads=0", "model.ranker.mixer.hstu.qk_dim=y"]
    paths = [line.split(": ")[1] for line in findings(config.prepare, write(RANKER), overrides)]
    # Not train.num_epochs and not model.ranker.mixer.hstu.qk_dim for being absent.
    assert paths == [
        "data.bath_size",
        "train.num_steps",
        "model.ranker.mixer.hstu.qk_dim",
        "model.ranker.mixer.hstu.num_heads",
        "model.ranker.tasks[0].metrics[0].ndcg",
    ]


def test_no_torch_is_needed():
    code = "import sys; from recsys import config, cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_override_that_a_later_one_replaces_is_told(write):
    path = write(RANKER)
    given = ["data.key_columns=user", "train.seed=3", "data.key_columns = day"]
    ready = config.prepare(path, given, read_files=False)
    assert list(ready.pipeline.data.key_columns) == ["day"]
    (finding,) = ready.warnings
    assert finding.startswith(
        "--set data.key_columns=user: a later --set data.key_columns replaces it; a list "
    )
    both = config.prepare(path, ["data.key_columns=['user', 'day']"], read_files=False)
    assert list(both.pipeline.data.key_columns) == ["user", "day"] and both.warnings == []
