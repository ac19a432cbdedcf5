"""Changes that a run may resume with, and the errors about all others."""

from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf import text_format

from recsys import protos as pb
from recsys.data.sources.base import FileMark
from recsys.errors import ConfigError, DataError, RecsysError
from recsys.training.resume import (
    MAY_CHANGE,
    MODEL_MAY_CHANGE,
    changed_schedule,
    differences,
    require_same_config,
    require_same_inputs,
    require_same_model,
)
from recsys.training.state import Inputs, Progress, SavedState

TEXT = """
data { train { parquet { paths: "a.parquet" } } batch_size: 8 }
features { name: "item_id" sides: [HISTORY] id { vocabulary {} } }
model { embedding_dim: 16 ranker { mixer { hstu { num_layers: 2 } } } }
train { num_steps: 10 dense_optimizer { adamw { lr: 0.1 } } }
"""

MODEL_TEXT = """
data { batch_size: 8 }
features { name: "tag" sides: [HISTORY] id { hash { num_buckets: 9 } multi_valued: true } }
features { name: "age" sides: [USER] numeric { bucketize { boundaries: [1, 2] } } }
model {
  embedding_dim: 16
  ranker {
    preprocessor {
      contextual { action { bits { name: "click" bit: 0 } } positional { num_time_buckets: 4 time_unit: 60 } }
    }
    mixer { hstu { num_layers: 2 qk_dim: 8 } }
    tasks { name: "time" loss { mean_squared_error { log1p: true } } }
  }
}
"""


def parse(text: str) -> pb.Pipeline:
    return text_format.Parse(text, pb.Pipeline())


def faults(old: str, new: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        require_same_config(parse(old), parse(new), "runs/x")
    return caught.value.findings[1:]


def test_the_same_config_is_the_same():
    require_same_config(parse(TEXT), parse(TEXT), "runs/x")


def test_a_default_that_is_written_out_is_no_difference():
    require_same_config(parse(TEXT), parse(TEXT.replace("num_steps: 10", "num_steps: 10 seed: 1")), "runs/x")


@pytest.mark.parametrize(
    ("old", "new", "finding"),
    [
        ("embedding_dim: 16", "embedding_dim: 32", "model.embedding_dim: 16 in runs/x, 32 now"),
        ("lr: 0.1", "lr: 0.2", "train.dense_optimizer.adamw.lr: 0.1 in runs/x, 0.2 now"),
        ("batch_size: 8", "", "data.batch_size: 8 in runs/x, 64 now"),
        (
            "num_layers: 2",
            "num_layers: 2 dropout: 0.5",
            "model.ranker.mixer.hstu.dropout: 0.0 in runs/x, 0.5 now",
        ),
        (
            "sides: [HISTORY]",
            "sides: [HISTORY, CANDIDATE]",
            "features[0].sides[1]: absent in runs/x, 'CANDIDATE' now",
        ),
        (
            "batch_size: 8",
            "batch_size: 8 stochastic_length { selection: NEWEST }",
            "data.stochastic_length.selection: absent in runs/x, 'NEWEST' now",
        ),
    ],
)
def test_a_difference_is_shown_with_both_values(old, new, finding):
    assert finding in faults(TEXT, TEXT.replace(old, new))


def test_another_mixer_is_a_difference():
    messages = faults(TEXT, TEXT.replace("hstu { num_layers: 2 }", "sasrec { num_layers: 2 }"))
    assert any(
        line.startswith("model.ranker.mixer.hstu") and line.endswith("absent now") for line in messages
    )
    assert any(line.startswith("model.ranker.mixer.sasrec") for line in messages)


def test_a_longer_run_whose_learning_rate_jumps_is_told_so():
    cosine, constant = pb.Schedule(cosine={}), pb.Schedule(constant={})
    line = changed_schedule(cosine, 20, 20, 40)
    # 20 of 20 steps: cos(pi) makes 0. 20 of 40: cos(pi / 2) makes one half.
    assert line.startswith("train.schedule: the run had 20 steps when it was saved and has 40 now, ")
    assert "learning rate is 0.5 of its peak instead of 0." in line
    assert changed_schedule(cosine, 20, 40, 40) is None
    assert changed_schedule(constant, 20, 20, 40) is None
    assert changed_schedule(pb.Schedule(warmup_steps=30, cosine={}), 20, 35, 40) is None


def test_lengths_logging_and_evaluation_may_change():
    changed = TEXT.replace("num_steps: 10", "num_steps: 99 log_every_steps: 3 evaluation { patience: 2 }")
    changed = changed.replace("batch_size: 8", "batch_size: 8 num_workers: 5 validation { synthetic {} }")
    require_same_config(parse(TEXT), parse(changed), "runs/x")


def test_what_an_error_about_a_bad_row_advises_may_be_done():
    changed = TEXT.replace("batch_size: 8", "batch_size: 8 bad_rows { policy: SKIP limit: 7 }")
    require_same_config(parse(TEXT), parse(changed), "runs/x")


def trained(text: str = MODEL_TEXT) -> SavedState:
    return SavedState(Progress(), [], Inputs([], {}), text, {}, world_size=1)


@pytest.mark.parametrize(
    ("old", "new", "finding"),
    [
        ("time_unit: 60", "time_unit: 3600", "positional.time_unit: 60.0 in step-1, 3600.0 now"),
        ("qk_dim: 8", "qk_dim: 8 scale_len: 9", "hstu.scale_len: absent in step-1, 9.0 now"),
        ("log1p: true", "", "loss.mean_squared_error.log1p: True in step-1, absent now"),
        ("multi_valued: true", "multi_valued: true pooling: MEAN", "pooling: 'SUM' in step-1, 'MEAN' now"),
        ("bit: 0", "bit: 4", "action.bits[0].bit: 0 in step-1, 4 now"),
        ("boundaries: [1, 2]", "boundaries: [1, 3]", "bucketize.boundaries[1]: 2.0 in step-1, 3.0 now"),
    ],
)
def test_weights_are_not_used_in_another_model_of_the_same_shape(old, new, finding):
    changed = MODEL_TEXT.replace(old, new)
    assert changed != MODEL_TEXT
    with pytest.raises(ConfigError) as caught:
        require_same_model(trained(), parse(changed), Path("step-1"))
    first, *rest = caught.value.findings
    assert first.startswith("step-1 was trained with another model")
    (only,) = rest
    assert only.endswith(finding)


def test_weights_may_be_evaluated_on_other_rows_and_otherwise():
    changed = MODEL_TEXT.replace("batch_size: 8", "batch_size: 9 max_history_len: 7 test { synthetic {} }")
    changed = changed.replace("qk_dim: 8", 'qk_dim: 8 backend: "reference" deterministic: true')
    changed = changed.replace("embedding_dim: 16", "embedding_dim: 16 precision: BF16")
    changed = changed.replace('name: "time"', 'name: "time" weight: 3 label: "seconds" metrics { mae {} }')
    changed += "train { seed: 7 } export { parity_rows: 1 } predict { top_k: 3 }"
    require_same_model(trained(), parse(changed), Path("step-1"))


def test_a_state_of_another_version_is_said_to_be_one():
    with pytest.raises(RecsysError, match=r"^step-1: its config cannot be read .*another version of recsys"):
        require_same_model(trained("data { forgotten: 1 }"), parse(MODEL_TEXT), Path("step-1"))


@pytest.mark.parametrize("path", [*MAY_CHANGE, *MODEL_MAY_CHANGE])
def test_the_lists_name_fields_that_exist(path):
    descriptor = pb.Pipeline.DESCRIPTOR
    for name in path.split("."):
        field = descriptor.fields_by_name[name]
        descriptor = field.message_type


def test_files_may_move():
    moved = TEXT.replace('"a.parquet"', '"b/a.parquet"').replace("vocabulary {}", 'vocabulary { file: "v" }')
    moved = moved.replace("batch_size: 8", 'batch_size: 8 item_file: "elsewhere"')
    require_same_config(parse(TEXT), parse(moved), "runs/x")


def test_changed_files_are_named():
    saved = Inputs([FileMark("a", 1000, "x"), FileMark("b", 5, "y")], {"item": "v"})
    moved = [FileMark("elsewhere/a", 1000, "x"), FileMark("elsewhere/b", 5, "y")]
    require_same_inputs(saved, replace(saved, files=moved))
    now = replace(saved, files=[FileMark("a", 1000, "x"), FileMark("b", 5, "z"), FileMark("c", 7, "w")])
    with pytest.raises(DataError) as caught:
        require_same_inputs(saved, now)
    assert str(caught.value).splitlines()[1:] == [
        "b (5 bytes, y) when the run was saved, b (5 bytes, z) now",
        "no file when the run was saved, c (7 bytes, w) now",
    ]
    with pytest.raises(DataError, match="changed"):
        require_same_inputs(saved, replace(saved, files=saved.files[::-1]))
    with pytest.raises(DataError, match="the vocabulary of item is not the one that the model was trained"):
        require_same_inputs(saved, replace(saved, vocabularies={"item": "other"}))


def test_changed_items_are_named():
    saved = Inputs([], {"item": "v"}, "x")
    require_same_inputs(saved, replace(saved))
    with pytest.raises(DataError, match=r"^data.item_file changed since the run was saved"):
        require_same_inputs(saved, replace(saved, items="y"))
    # States of older versions have no such entry.
    require_same_inputs(replace(saved, items=None), saved)


def test_what_a_run_goes_on_with_but_not_bit_for_bit():
    versions = {"torch": "2.12.0", "torchrec": "1.7.0", "triton": "3.6"}
    state = SavedState(Progress(), [], Inputs([], {}), "", versions, world_size=2)
    assert differences(state, dict(versions), 2) == []
    (ranks,) = differences(state, versions, 4)
    assert ranks.startswith("it was saved by 2 processes and resumes with 4;")
    (changed,) = differences(state, {"torch": "2.13.0", "torchrec": "1.7.0", "numpy": "2.4"}, 2)
    assert changed.startswith(
        "it was saved with other versions (numpy (none) then, 2.4 now; torch 2.12.0 then, 2.13.0 now; "
        "triton 3.6 then, (none) now); losses may differ"
    )
