"""`compare_with_files`: the columns of the files that a config names, and the length of the run."""

import pytest

from recsys import config
from recsys.data.validation import compare_with_files

CONFIG = "configs/quickstart.config"


@pytest.mark.parametrize(
    ("overrides", "faults", "warnings"),
    [
        ([], [], []),
        (
            ["model.ranker.tasks[0].label=candidate_is_clik"],
            [f"{split}.parquet: no column candidate_is_clik" for split in ("train", "validation", "test")],
            [],
        ),
        (
            ["data.train.parquet.paths=['nowhere.parquet']"],
            [],
            ["data.train: its columns were not checked: nowhere.parquet: no such file"],
        ),
        # The sample has 10,210 training rows, so 2 epochs in batches of 1,100 are 20 steps.
        (
            [
                "train.num_epochs=2",
                "data.batch_size=1100",
                "train.evaluation.every_steps=21",
                "train.schedule.warmup_steps=20",
            ],
            [],
            ["schedule.warmup_steps: 20 is given and the run has 20 steps", "every_steps: 21 is given and"],
        ),
        (
            [
                "train.num_epochs=2",
                "data.batch_size=1100",
                "train.evaluation.every_steps=20",
                "train.schedule.warmup_steps=19",
            ],
            [],
            [],
        ),
    ],
)
def test_files_are_compared_with_the_config(overrides, faults, warnings):
    pipeline = config.prepare(CONFIG, overrides).pipeline
    compared = compare_with_files(pipeline)
    faults_found = [line for line in compared.faults if "has the columns" not in line]
    assert len(faults_found) == len(faults)
    assert all(part in line for part, line in zip(faults, faults_found, strict=True))
    assert len(compared.warnings) == len(warnings)
    assert all(part in line for part, line in zip(warnings, compared.warnings, strict=True))
