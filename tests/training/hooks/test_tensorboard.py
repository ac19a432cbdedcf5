"""TensorBoard reads what the hook wrote."""

from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from recsys.training.hooks import Diagnosed, Evaluated, Outcome, Run, Trained
from recsys.training.hooks.attention_image import describe, pixels, png
from recsys.training.hooks.projector import Items
from recsys.training.hooks.tensorboard import TensorBoard
from recsys.training.state import Best
from recsys.training.throughput import Rates
from tests.training.hooks.diagnostic_results import PICTURE, RESULTS

RUN = {"config_text": "train { num_steps: 10 }", "first_step": 0, "total_steps": 10}


def trained(step: int, rates: Rates) -> Trained:
    lengths = torch.tensor([3, 3, 0, 50])
    return Trained(
        step, 0, 0.5, {"a": 0.25}, {"dense": 0.1}, 2.0, rates, 9.0, memory=3 * 2**20, history_lengths=lengths
    )


def written(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder / "tensorboard"), size_guidance={"histograms": 0}).Reload()


def test_scalars_lengths_and_config(tmp_path):
    hook = TensorBoard(lambda: None)
    hook.started(Run(tmp_path, **RUN))
    hook.trained(trained(5, Rates(1, 20, 300, 0.125, flop_per_s=2e12, mfu=0.5)))
    hook.evaluated(Evaluated(5, {"a/auc": 0.75}, True, 0.1))
    hook.close()
    events = written(tmp_path)
    actual = {tag: events.Scalars(tag)[0] for tag in events.Tags()["scalars"]}
    assert {event.step for event in actual.values()} == {5}
    assert {tag: event.value for tag, event in actual.items()} == pytest.approx(
        {
            "train/loss": 0.5,
            "train/loss/a": 0.25,
            "train/grad_norm": 2.0,
            "lr/dense": 0.1,
            "speed/samples_per_s": 20,
            "speed/tokens_per_s": 300,
            "speed/tflop_per_s": 2,
            "speed/mfu": 0.5,
            "speed/data_wait": 0.125,
            "memory/peak_mib": 3,
            "validation/a/auc": 0.75,
        }
    )
    (lengths,) = events.Histograms("data/history_length")
    values = lengths.histogram_value
    assert (lengths.step, values.min, values.max, values.num, values.sum) == (5, 0, 50, 4, 56)
    assert b"num_steps: 10" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


def test_runs_can_be_compared_by_hyperparameters_and_best_metric(tmp_path):
    hook = TensorBoard(lambda: None)
    hook.started(Run(tmp_path, **RUN, hyperparameters={"train.lr": 0.25, "mixer": "hstu", "wide": True}))
    hook.finished(Outcome(10, "", tmp_path, Best("a/auc", 0.75, 6)))
    hook.close()
    events = written(tmp_path)
    (best,) = events.Scalars("best/a/auc")
    assert (best.step, best.value) == (10, 0.75)
    data = {tag: HParamsPluginData.FromString(text) for tag, text in plugin_data(events).items()}
    given = data["_hparams_/session_start_info"].session_start_info.hparams
    assert (given["train.lr"].number_value, given["mixer"].string_value) == (0.25, "hstu")
    assert given["wide"].number_value == 1
    (metric,) = data["_hparams_/experiment"].experiment.metric_infos
    assert metric.name.tag == "best/a/auc"
    # One run in TensorBoard, not one for training and one for its settings.
    assert [path.name for path in (tmp_path / "tensorboard").iterdir() if path.is_dir()] == []


def test_the_projector_gets_vectors_with_names(tmp_path):
    vectors = torch.tensor([[0.5, 1.0], [2.0, -3.0]])
    items = Items(vectors, ids=["17", "4"], names=["Heat\t(1995)\n", ""])
    hook = TensorBoard(lambda: items)
    hook.started(Run(tmp_path, **RUN))
    hook.finished(Outcome(10, "", tmp_path))
    hook.close()
    folder = tmp_path / "tensorboard"
    assert (folder / "00010/items/metadata.tsv").read_text() == "name\tid\nHeat (1995)\t17\n4\t4\n"
    lines = (folder / "00010/items/tensors.tsv").read_text().splitlines()
    assert [[float(x) for x in line.split("\t")] for line in lines] == vectors.tolist()
    assert 'tensor_path: "00010/items/tensors.tsv"' in (folder / "projector_config.pbtxt").read_text()


def test_pictures_of_attention_with_what_they_show(tmp_path):
    hook = TensorBoard(lambda: None)
    hook.started(Run(tmp_path, **RUN))
    hook.diagnosed(Diagnosed(7, RESULTS))
    hook.close()
    events = written(tmp_path)
    tag = "attention, layer 2/user 7"
    assert set(events.PluginTagToContent("images")) == {tag}
    (event,) = events.Tensors(tag)
    image = pixels(PICTURE)
    width, height, file = event.tensor_proto.string_val
    assert (event.step, int(width), int(height)) == (7, image.shape[1], image.shape[0])
    assert file == png(image)
    assert events.SummaryMetadata(tag).summary_description == describe(PICTURE)


def plugin_data(events: EventAccumulator) -> dict[str, bytes]:
    return dict(events.PluginTagToContent("hparams"))
