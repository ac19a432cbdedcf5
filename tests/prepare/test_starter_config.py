"""The starter config: its settings for data of several sizes, and its lines that are switched off."""

import json
from pathlib import Path

import pytest

from recsys import config
from recsys.prepare.starter_config import OFF, starter_config
from recsys.prepare.starter_settings import choose_settings

MOVIELENS, KUAIRAND = Path("tests/data/movielens"), Path("tests/data/kuairand")


def schema_of(folder=MOVIELENS):
    return json.loads((folder / "schema.json").read_text(encoding="utf-8"))


def sized(rows, events, items, folder=MOVIELENS, max_history=None):
    schema = schema_of(folder)
    schema["splits"]["train"] |= {"rows": rows, "history_events": events}
    schema["features"][0]["vocabulary_size"] = items
    schema["settings"]["max_history"] = max_history
    return schema


# Rows, events and items of the logs in experiments/2026-11-24-starter, with the settings measured there.
@pytest.mark.parametrize(
    ("rows", "events", "items", "batch_size", "lr", "dropout", "layers", "blend"),
    [
        (300, 32_509, 3_044, 16, 5e-3, 0.5, 1, True),
        (671, 98_662, 9_125, 32, 5e-3, 0.5, 1, True),
        (1_000, 105_017, 3_437, 32, 5e-3, 0.5, 1, True),
        (6_040, 988_129, 3_883, 256, 4e-3, 0.2, 2, False),
        (22_363, 153_776, 12_101, 1024, 2e-3, 0.5, 2, False),
    ],
)
def test_settings_follow_the_size_of_the_log(rows, events, items, batch_size, lr, dropout, layers, blend):
    chosen = choose_settings(sized(rows, events, items))
    assert (chosen.batch_size, chosen.lr, chosen.dropout) == (batch_size, lr, dropout)
    assert (chosen.num_layers, chosen.blend) == (layers, blend)


@pytest.mark.parametrize("folder", [MOVIELENS, KUAIRAND])
@pytest.mark.parametrize("rows", [1, 30, 3_000, 10**6, 10**9])
def test_any_size_gives_a_run_with_evaluations_and_a_warm_up_inside_it(folder, rows):
    chosen = choose_settings(sized(rows, rows * 300, 1000, folder))
    steps = chosen.num_epochs * -(-rows // chosen.batch_size)
    assert chosen.steps == steps
    assert chosen.warmup_steps <= steps / 10
    assert 1 <= chosen.every_steps <= steps
    # Long histories: a batch of 1,000 rows with 200 events each would need gigabytes for its scores.
    assert chosen.batch_size * min(300, chosen.max_history_len) <= 2**16


def test_no_more_events_are_asked_for_than_were_kept():
    assert choose_settings(sized(1000, 9000, 100, max_history=50)).max_history_len == 50
    assert choose_settings(sized(1000, 9000, 100, max_history=500)).max_history_len == 200


@pytest.mark.parametrize("rows", [671, 6040])
def test_the_two_tower_model_can_be_switched_on(tmp_path, rows):
    text = starter_config(sized(rows, 98_662, 9_125), MOVIELENS.as_posix())
    assert ("recsys.blend" in text) == (rows == 671)
    (tmp_path / "x.config").write_text(text.replace(OFF, ""), encoding="utf-8")
    pipeline = config.prepare(tmp_path / "x.config").pipeline
    assert pipeline.data.item_file == "tests/data/movielens/items.parquet"
    assert [feature.name for feature in pipeline.features] == ["item_id", "genres"]
    assert pipeline.model.retriever.item_encoder.residual
    (tmp_path / "y.config").write_text(text, encoding="utf-8")
    ready = config.prepare(tmp_path / "y.config")
    assert not ready.pipeline.model.retriever.HasField("item_encoder")
    assert ready.warnings == []


@pytest.mark.parametrize("folder", [MOVIELENS, KUAIRAND])
def test_the_bundled_samples_have_the_starter_of_this_version(folder):
    assert (folder / "starter.config").read_text(encoding="utf-8") == starter_config(
        schema_of(folder), folder.as_posix()
    )
