"""Renders a picture of attention: pixels, a PNG file, and a description in Markdown."""

import struct
import zlib

import torch
from torch import Tensor

from recsys.ops.jagged.layout import CONTEXTUAL, TARGET, UIH
from recsys.training.attention import AttentionPicture

SIZE = 640
"""Approximate edge length in pixels; each token gets a whole number of pixels."""

STRIP, GAP = 8, 2
"""Width in pixels of the strips that show the kinds of tokens, and of the gap between strip and weights."""

_KIND = {CONTEXTUAL: (154, 79, 214), UIH: (47, 111, 222), TARGET: (224, 112, 26)}
_PAPER, _HIDDEN = (255, 255, 255), (226, 230, 236)
_POSITIVE, _NEGATIVE = (16, 42, 100), (186, 28, 60)

_LARGEST_TOKEN = 24


def pixels(picture: AttentionPicture) -> Tensor:
    """Draws the weights as uint8 [height, width, 3]: one row per query, one column per key.

    The first token is at the top left.

    Strips along both axes show the kind of each token. The larger the square root of a weight relative to
    that of the largest weight, the darker its pixels.
    """
    paper, hidden, positive, negative = _colours(_PAPER, _HIDDEN, _POSITIVE, _NEGATIVE)
    largest = picture.weights.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    strength = (picture.weights.abs() / largest).sqrt()[..., None]
    ink = torch.where(picture.weights[..., None] < 0, negative, positive)
    cells = torch.where(picture.visible[..., None], paper + strength * (ink - paper), hidden)
    count = len(picture.kinds)
    scale = max(1, min(_LARGEST_TOKEN, SIZE // count))
    cells = cells.repeat_interleave(scale, 0).repeat_interleave(scale, 1)
    margin = STRIP + GAP
    image = paper.repeat(margin + count * scale, margin + count * scale, 1)
    image[margin:, margin:] = cells
    strip = _colours(*_KIND.values())[picture.kinds.long()].repeat_interleave(scale, 0)
    image[:STRIP, margin:] = strip
    image[margin:, :STRIP] = strip[:, None]
    return image.round().to(torch.uint8)


def describe(picture: AttentionPicture) -> str:
    """Describes a picture in Markdown."""
    shown = len(picture.kinds)
    left_out = ""
    if shown < picture.num_tokens:
        left_out = (
            f" {shown} of {picture.num_tokens:,} tokens are shown: the newest events, the first candidates."
        )
    return (
        f"Layer {picture.layer} of {picture.num_layers}, mean over heads of {picture.formula}. "
        "Rows are the tokens that attend, columns the tokens attended to, from the top left. "
        "Strips: contextual tokens purple, history blue (oldest event first), candidates orange. "
        "White is 0, dark blue is the largest weight (shaded by square root), red is negative, "
        f"and gray is hidden by the mask.{left_out}"
    )


def png(image: Tensor) -> bytes:
    """Encodes uint8 [height, width, 3] as a PNG file.

    Source: W3C, Portable Network Graphics, third edition.
    """
    height, width, _ = image.shape
    lines = torch.cat([image.new_zeros(height, 1), image.flatten(1)], dim=1)  # 0: the line is not filtered
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = (b"IHDR", head), (b"IDAT", zlib.compress(lines.numpy().tobytes())), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def _colours(*colours: tuple[int, int, int]) -> Tensor:
    return torch.tensor(colours, dtype=torch.float32)
