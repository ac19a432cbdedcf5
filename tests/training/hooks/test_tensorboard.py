"""TensorBoard reads what the hook wrote."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recsys.training.hooks import Evaluated, Run, Trained
from recsys.training.hooks.tensorboard import TensorBoard
from recsys.training.throughput import Rates


def test_scalars_and_config(tmp_path):
    hook = TensorBoard()
    hook.started(Run(tmp_path, "train { num_steps: 10 }", 0, 10))
    hook.trained(Trained(5, 0, 0.5, {"a": 0.25}, {"dense": 0.1}, 2.0, Rates(1, 20, 300, 0.125), 9.0))
    hook.evaluated(Evaluated(5, {"a/auc": 0.75}, True, 0.1))
    hook.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = {tag: events.Scalars(tag)[0] for tag in events.Tags()["scalars"]}
    assert {event.step for event in found.values()} == {5}
    assert {tag: event.value for tag, event in found.items()} == pytest.approx(
        {
            "train/loss": 0.5,
            "train/loss/a": 0.25,
            "train/grad_norm": 2.0,
            "lr/dense": 0.1,
            "speed/samples_per_s": 20,
            "speed/tokens_per_s": 300,
            "speed/data_wait": 0.125,
            "validation/a/auc": 0.75,
        }
    )
    assert b"num_steps: 10" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
