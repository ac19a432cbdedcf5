"""A feature that is on makes a difference, where it can make one and nowhere else; one that is set to do
nothing makes none.

Weights depend on their names only, so what differs is the feature.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from recsys import protos as pb
from recsys.models import Model
from tests.modules.pipelines import random_rows
from tests.oracle import models
from tests.oracle.combinations import pipeline

BASE = {
    "contextual": "3 contextual",
    "mask": "no window",
    "truncation": "no truncation",
    "placement": "summed",
    "channels": "1 channel",
    "bias": "bias",
    "form": "production",
    "stacks": "alike",
    "scale": "scale",
    "biases": "shared",
    "unit": "mask in tokens",
    "groups": "single targets",
    "reads": "contextual reads",
    "positional": "from the end",
    "postprocessor": "layer norm",
}
# Tables of one size in all forms.
LENGTH = "model { max_seq_len: 40 }"
SIZES = [(9, 3), (0, 2), (4, 0), (1, 1), (7, 4), (2, 2), (3, 2), (5, 1), (6, 2)]


def hstu(change: str) -> str:
    return f"model {{ ranker {{ mixer {{ hstu {{ {change} }} }} }} }}"


def contextual(change: str) -> str:
    return f"model {{ ranker {{ preprocessor {{ contextual {{ {change} }} }} }} }}"


class Case(NamedTuple):
    """A feature: values of axes without and with it, and the rows and candidates that it can change."""

    off: dict[str, str]
    on: dict[str, str]
    changes: Callable[[int, int], bool]  # by events of the row and place of the candidate


def more_than(limit: int) -> Callable[[int, int], bool]:
    return lambda events, place: events > limit


def everything(events: int, place: int) -> bool:
    return True


WINDOW, PREFIX = {"mask": "window"}, {"mask": "window and prefix"}
TWO, TAIL = {"placement": "interleaved"}, {"truncation": "tail in tokens"}
CASES = {
    "window of 2": Case({}, WINDOW, more_than(2)),
    "window in events": Case(TWO | WINDOW, TWO | WINDOW | {"unit": "mask in events"}, more_than(1)),
    "prefix": Case(WINDOW, PREFIX, more_than(2)),
    # The last 2 and the first 1.
    "target window": Case(PREFIX, {"mask": "target window"}, more_than(3)),
    "tail of 5": Case({}, TAIL, more_than(5)),
    # 6 tokens against 5.
    "tail in events": Case(TWO | TAIL, TWO | {"truncation": "tail in events"}, more_than(2)),
    "tail behind a window": Case(WINDOW, WINDOW | TAIL, more_than(5)),
    "interleaved": Case({}, TWO, more_than(0)),
    "target groups": Case({}, {"groups": "groups of 2"}, lambda events, place: place % 2 == 1),
    "contextual reads": Case({"reads": "contextual reads not"}, {}, more_than(0)),
    "contextual tokens": Case({"contextual": "0 contextual"}, {}, everything),
    "bias": Case({"bias": "no bias"}, {}, everything),
    "bias by time": Case({"biases": "positions only"}, {}, everything),
    "positions": Case({"positional": "no positions"}, {"positional": "short table"}, everything),
    "origin": Case({}, {"positional": "from the start"}, everything),
    "activation and group norm": Case({}, {"form": "grouped"}, everything),
    "scale": Case({"scale": "scale of the model"}, {}, everything),
    "postprocessor": Case({"postprocessor": "as it is"}, {"postprocessor": "length 1"}, everything),
    "channels": Case({}, {"channels": "2 channels"}, everything),
}


def build(changes: dict[str, str], *texts: str) -> tuple[Model, pb.Pipeline]:
    written = pipeline(BASE | changes)
    for text in (LENGTH, *texts):
        written.MergeFrom(models.written(text))
    return models.build(written), written


def logits(built: tuple[Model, pb.Pipeline], sizes: list[tuple[int, int]]) -> Tensor:
    model, written = built
    with torch.no_grad():
        return models.logits(model, written, random_rows(models.resolved(written), sizes))


@pytest.mark.parametrize("case", CASES)
def test_a_feature_changes_what_it_can_change_and_nothing_else(case: str):
    off, on, changes = CASES[case]
    actual = [logits(build(changed), SIZES) for changed in (off, on)]
    difference = (actual[0] - actual[1]).abs().amax(dim=1).tolist()
    expected = [changes(events, place) for events, count in SIZES for place in range(count)]
    assert [item > 1e-6 for item in difference] == expected
    assert max(difference) > 1e-3
    assert max([0, *(d for d, may in zip(difference, expected, strict=True) if not may)]) < 1e-12


IN_TRAINING = {
    "stochastic depth": hstu("stochastic_depth: 0.9"),
    "dropout": hstu("dropout: 0.5"),
    "input dropout": hstu("input_dropout: 0.5"),
    "output dropout": hstu("output_dropout: 0.5"),
    "dropout of tokens": contextual("dropout: 0.5"),
}


@pytest.mark.parametrize("feature", IN_TRAINING)
def test_what_is_for_training_changes_nothing_else(feature: str):
    plain, drawn = build({}), build({}, IN_TRAINING[feature])
    expected = logits(plain, SIZES)
    assert torch.equal(logits(drawn, SIZES), expected)
    plain[0].train()
    drawn[0].train()
    assert torch.equal(logits(plain, SIZES), expected)
    first, second = logits(drawn, SIZES), logits(drawn, SIZES)
    assert min((first - expected).abs().max(), (first - second).abs().max()) > 1e-2


def zeroed(built: tuple[Model, pb.Pipeline], part: str) -> tuple[Model, pb.Pipeline]:
    model, written = built
    actual = [parameter for name, parameter in model.named_parameters() if part in name]
    assert actual
    for parameter in actual:
        torch.nn.init.zeros_(parameter)
    return model, written


NOTHING = {
    "a window of everything": ({}, hstu("mask { window: 18 }"), ""),
    "a window for targets that is none": ({}, hstu("mask { target_window: true }"), ""),
    "a bias of zeros": ({"bias": "no bias"}, hstu("bias {}"), ".biases."),
    "ages of zeros": (
        {"positional": "short table"},
        contextual("positional { num_time_buckets: 9 }"),
        "positional.time",
    ),
}


@pytest.mark.parametrize("case", NOTHING)
def test_what_is_set_to_do_nothing_does_nothing(case: str):
    without, feature, zeros = NOTHING[case]
    actual = zeroed(build(without, feature), zeros) if zeros else build(without, feature)
    torch.testing.assert_close(logits(actual, SIZES), logits(build(without), SIZES), rtol=0, atol=1e-12)


def test_a_tail_of_everything_does_nothing():
    groups = "layer_groups { num_layers: 1 } layer_groups { num_layers: 1 tail_len: 9 }"
    single, all_of_it = build({}), pipeline(BASE)
    all_of_it.model.ranker.mixer.hstu.ClearField("num_layers")
    all_of_it.model.ranker.mixer.hstu.ClearField("mask")
    for text in (LENGTH, hstu(groups)):
        all_of_it.MergeFrom(models.written(text))
    actual = logits((models.build(all_of_it), all_of_it), SIZES)
    torch.testing.assert_close(actual, logits(single, SIZES), rtol=0, atol=1e-12)


def test_a_channel_of_everything_is_the_only_sequence_of_a_row():
    plain = build({})
    mixture = build({"channels": "2 channels"})[1]
    channels = mixture.model.ranker.preprocessor.contextual.channels
    for field in ("bits", "min_watch_time"):
        channels[1].ClearField(field)
    model = models.build(mixture)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in plain[0].named_parameters():
            weights[name if name in weights else name.replace("mix.", "mix.stacks.1.")].copy_(parameter)
        weights["mix.fuse.bias"].zero_()
        for stack in (0, 1):
            weights["mix.fuse.weight"].zero_()
            weights["mix.fuse.weight"][:, 8 * stack : 8 * (stack + 1)].copy_(torch.eye(8))
            same = torch.allclose(logits((model, mixture), SIZES), logits(plain, SIZES), rtol=0, atol=1e-12)
            assert same == (stack == 1)
