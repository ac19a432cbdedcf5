"""Pixels are read back, from the tensor and from the file."""

import io
from dataclasses import replace

import pytest
import torch

from recsys.training.hooks.attention_image import GAP, SIZE, STRIP, describe, pixels, png
from tests.training.hooks.diagnostic_results import PICTURE

EDGE = STRIP + GAP
TOKEN = 24
WHITE, GREY = [255, 255, 255], [226, 230, 236]
BLUE, RED = [16, 42, 100], [186, 28, 60]


def cell(image, query: int, key: int) -> list[int]:
    """The one colour of a weight."""
    rows, columns = (slice(EDGE + TOKEN * n, EDGE + TOKEN * (n + 1)) for n in (query, key))
    (colour,) = image[rows, columns].flatten(0, 1).unique(dim=0).tolist()
    return colour


def test_a_weight_is_a_square_of_its_colour():
    image = pixels(PICTURE)
    assert (image.dtype, tuple(image.shape)) == (torch.uint8, (EDGE + 3 * TOKEN, EDGE + 3 * TOKEN, 3))
    assert cell(image, 1, 1) == BLUE
    assert cell(image, 2, 1) == WHITE
    assert cell(image, 0, 1) == cell(image, 1, 2) == GREY
    # The roots of 1/4 and 1/16 of the largest weight, as shares of the way from white to ink.
    assert cell(image, 0, 0) == [round(255 + 0.5 * (ink - 255)) for ink in BLUE]
    assert cell(image, 1, 0) == [round(255 + 0.25 * (ink - 255)) for ink in RED]


def test_strips_tell_the_kinds_of_tokens_on_both_axes():
    image = pixels(PICTURE)
    kinds = [[154, 79, 214], [47, 111, 222], [224, 112, 26]]
    middles = [EDGE + TOKEN // 2 + TOKEN * number for number in range(3)]
    assert image[0, middles].tolist() == image[middles, 0].tolist() == kinds
    assert image[:EDGE, :EDGE].unique().tolist() == [255]


def test_long_samples_get_fewer_pixels_a_token():
    count = 256
    long = replace(
        PICTURE,
        weights=torch.zeros(count, count),
        visible=torch.ones(count, count, dtype=torch.bool),
        kinds=torch.ones(count, dtype=torch.int8),
    )
    image = pixels(long)
    assert len(image) == EDGE + count * (SIZE // count)
    assert image[EDGE:, EDGE:].unique().tolist() == [255], "without a weight all is white"


def test_the_file_holds_the_pixels():
    reader = pytest.importorskip("PIL.Image")
    image = pixels(PICTURE)[:, :50]
    with reader.open(io.BytesIO(png(image))) as opened:
        opened.verify()
    with reader.open(io.BytesIO(png(image))) as opened:
        assert (opened.format, opened.mode, opened.size) == ("PNG", "RGB", (50, len(image)))
        assert list(opened.tobytes()) == image.flatten().tolist()


def test_the_description_says_what_is_shown():
    text = describe(PICTURE)
    assert text.startswith("Layer 2 of 3, mean over heads of silu(scores) / 65.")
    assert "3 of 900 tokens are shown" in text
    assert "are shown" not in describe(replace(PICTURE, num_tokens=3))
