"""The selection of settings as hyperparameters."""

from recsys.training.hooks.hyperparameters import hyperparameters
from tests.modules.pipelines import RANKER, pipeline_of

TRAIN = """
data { vocabulary_dir: "somewhere" num_workers: 7 batch_size: 16 }
train {
  num_steps: 16
  dense_optimizer { adamw { lr: 2e-3 } }
  schedule { warmup_steps: 4 cosine {} }
  log_every_steps: 5
  evaluation { every_steps: 6 }
}
"""


def test_numbers_and_choices_with_their_paths():
    actual = hyperparameters(pipeline_of(RANKER, TRAIN))
    expected = {
        "data.batch_size": 16,
        "data.max_history_len": 6,
        "model.embedding_dim": 8,
        "model.precision": "FP32",
        "model.ranker.mixer.mixer": "hstu",
        "model.ranker.mixer.hstu.scale_len": 3,
        "model.ranker.mixer.hstu.activation": "U",
        "model.ranker.preprocessor.contextual.content.hidden": "16",
        "model.ranker.preprocessor.contextual.action.watch_time_thresholds": "3.0, 10.0",
        "model.ranker.tasks[1].weight": 0.5,
        "train.dense_optimizer.adamw.lr": 2e-3,
        "train.dense_optimizer.adamw.beta1": 0.9,  # the default of the schema
        "train.schedule.decay": "cosine",
        "train.schedule.cosine.final_factor": 0,
        "train.duration": "num_steps",
        "train.num_steps": 16,
    }
    assert {path: actual.get(path) for path in expected} == expected


def test_nothing_that_training_does_not_depend_on():
    actual = hyperparameters(pipeline_of(RANKER, TRAIN))
    assert {type(value) for value in actual.values()} <= {bool, int, float, str}
    for part in ("vocabulary", "num_workers", "log_every", "evaluation", "metrics", "features", ".name"):
        assert [path for path in actual if part in path] == []
