"""The yardstick against the model: the same loss and gradients, for masks and biases of all kinds."""

from itertools import islice
from pathlib import Path

import pytest
import torch

from recsys import config
from recsys.data.loader import Loader
from recsys.models import build_model, layout_rule
from scripts.bench_cpu import RANKING, RETRIEVAL, check_same_gradients
from scripts.padded_model import JaggedModel, PaddedModel, pad

ROOT = Path(__file__).resolve().parents[2]
HSTU = "model.ranker.mixer.hstu"


def setting(path, overrides=(), rows=16):
    pipeline = config.prepare(
        ROOT / path, ["data.num_workers=0", f"data.batch_size={rows}", *overrides]
    ).pipeline
    loader = Loader.open(pipeline, "train", layout_rule(pipeline), shuffle=True)
    return pipeline, next(islice(loader.epoch(0), 1))


@pytest.mark.parametrize(
    ("path", "overrides"),
    [
        (RANKING, []),
        (RANKING, [f"{HSTU}.bias.num_time_buckets=16", f"{HSTU}.bias.per_head=true"]),
        (RANKING, [f"{HSTU}.mask.window=3", f"{HSTU}.mask.contextual_reads_history=false"]),
        (RETRIEVAL, []),
        (RETRIEVAL, ["model.retriever.mixer.hstu.mask.window=5", "data.max_history_len=30"]),
    ],
)
def test_loss_and_gradients_are_those_of_the_jagged_model(path, overrides):
    pipeline, batch = setting(path, overrides)
    filled = pad(batch, pipeline)
    assert filled.batch.layout.total_len > batch.layout.total_len, "nothing was padded"
    model = build_model(pipeline)
    check_same_gradients(JaggedModel(model), batch, PaddedModel(model), filled)


@pytest.mark.parametrize(("path", "in_front"), [(RANKING, True), (RETRIEVAL, False)])
def test_rows_are_filled_to_the_longest(path, in_front):
    pipeline, batch = setting(path)
    full = pad(batch, pipeline).batch
    longest, begin = int(batch.uih_lengths.max()), 0
    items, filled = batch.ids["uih_item_id"].values(), full.ids["uih_item_id"].values().view(-1, longest)
    for row, length in enumerate(batch.uih_lengths.tolist()):
        filling = [0] * (longest - length)
        real = items[begin : begin + length].tolist()
        assert filled[row].tolist() == (filling + real if in_front else real + filling)
        begin += length
    assert full.layout.lengths.unique().numel() == 1
    assert full.uih_timestamps.numel() == filled.numel()


def test_dropping_the_mask_would_be_noticed():
    pipeline, batch = setting(RANKING)
    model = build_model(pipeline)
    padded = PaddedModel(model)
    look_at = padded.attention.look_at

    def without_mask(filled):
        look_at(filled)
        padded.attention.hidden = torch.zeros_like(padded.attention.hidden)

    padded.attention.look_at = without_mask
    with pytest.raises(AssertionError):
        check_same_gradients(JaggedModel(model), batch, padded, pad(batch, pipeline))


def test_another_mixer_has_no_padded_form():
    pipeline, _ = setting(RETRIEVAL, ["model.retriever.mixer.sasrec={num_heads: 1}"])
    with pytest.raises(TypeError, match="SasRecMixer"):
        PaddedModel(build_model(pipeline))
