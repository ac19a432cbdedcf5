"""Draws the pictures of docs/ as SVG files:   python scripts/draw_docs.py [--check]

The squares of the masks are the entries of `dense_mask`, and the tokens that a truncation keeps are those of
`SequenceLayout.truncate`, so a picture changes when the definition does. `--check` writes nothing and exits
with 1 if a file in docs/figures differs from what would be drawn.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import torch

from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.jagged.mask import AttentionMask, dense_mask

FOLDER = Path(__file__).resolve().parent.parent / "docs/figures"
CONTEXTUAL, HISTORY, TARGET, ACTION = "#7c6fd6", "#3f88c5", "#e8873a", "#79b8e8"
INK, FAINT, PAPER = "#24303c", "#e7ecf1", "#ffffff"
CELL = 20
"""Side of a token's box and of a square of a mask, in pixels."""


class Drawing:
    """Shapes of one SVG file, on white paper so that it reads in a dark theme too."""

    def __init__(self, width: int, height: int, title: str):
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="system-ui, sans-serif" font-size="13" role="img">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, fill: str, *, edge: str = "none") -> None:
        """Adds a rectangle with round corners."""
        self._lines.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" '
            f'stroke="{edge}"/>'
        )

    def text(
        self, x: float, y: float, words: str, *, fill: str = INK, anchor: str = "start", bold: bool = False
    ) -> None:
        """Adds one line of text with its baseline at y."""
        weight = ' font-weight="600"' if bold else ""
        self._lines.append(
            f'<text x="{x:g}" y="{y:g}" fill="{fill}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Adds a straight arrow along one axis."""
        sign = 1 if x2 + y2 > x1 + y1 else -1
        along, across = ((6 * sign, 0), (0, 4)) if y1 == y2 else ((0, 6 * sign), (4, 0))
        base_x, base_y = x2 - along[0], y2 - along[1]
        self._lines.append(
            f'<path d="M{x1:g} {y1:g}L{base_x:g} {base_y:g}" stroke="{INK}" stroke-width="1.5" fill="none"/>'
            f'<path d="M{x2:g} {y2:g}L{base_x + across[0]:g} {base_y + across[1]:g}'
            f'L{base_x - across[0]:g} {base_y - across[1]:g}z" fill="{INK}"/>'
        )

    def token(self, x: float, y: float, label: str, fill: str) -> None:
        """Adds a token: a small square with its label."""
        self.box(x, y, CELL - 2, CELL - 2, fill)
        self.text(x + CELL / 2 - 1, y + CELL - 7, label, fill=PAPER, anchor="middle")

    def svg(self) -> str:
        """Returns the finished file."""
        return "\n".join([*self._lines, "</svg>", ""])


def kinds(contextual: int, history: int, targets: int) -> list[tuple[str, str]]:
    """Returns label and color of each token of a sample [contextual | history | targets]."""
    return (
        [("c", CONTEXTUAL)] * contextual
        + [(str(number % 10), HISTORY) for number in range(1, history + 1)]
        + [("t", TARGET)] * targets
    )


def sample(contextual: int, history: int, targets: int) -> SequenceLayout:
    """Returns the layout of one sample."""
    length = torch.tensor([contextual + history + targets])
    return SequenceLayout(length, num_targets=torch.tensor([targets]), num_contextual=contextual)


def mask_picture(
    title: str, mask: AttentionMask, contextual: int = 2, history: int = 8, targets: int = 3
) -> str:
    """Draws a mask as a matrix: a colored square where the row's token sees the column's."""
    tokens = kinds(contextual, history, targets)
    visible = dense_mask(mask, sample(contextual, history, targets))[0].tolist()
    side = CELL * len(tokens)
    drawing = Drawing(side + 110, side + 80, title)
    drawing.text(16, 24, title, bold=True)
    for place, (label, color) in enumerate(tokens):
        drawing.token(80 + CELL * place, 38, label, color)
        drawing.token(54, 64 + CELL * place, label, color)
        for column, seen in enumerate(visible[place]):
            fill = tokens[column][1] if seen else FAINT
            drawing.box(80 + CELL * column, 64 + CELL * place, CELL - 2, CELL - 2, fill)
    drawing.text(44, 64 + side / 2, "query", anchor="end")
    drawing.text(44, 52, "key", anchor="end")
    return drawing.svg()


def row(drawing: Drawing, x: float, y: float, tokens: Sequence[tuple[str, str]]) -> float:
    """Draws tokens side by side; returns where they end."""
    for place, (label, color) in enumerate(tokens):
        drawing.token(x + CELL * place, y, label, color)
    return x + CELL * len(tokens)


def sequence_picture() -> str:
    """Draws the two ways in which an event's action enters a ranking sequence, and a retrieval sequence."""
    drawing = Drawing(730, 250, "The sequence of a ranker and of a retriever")
    interleaved = [pair for number in "12345" for pair in ((number, HISTORY), ("a", ACTION))]
    rows = (
        ("Ranker, SUMMED: one token an event", kinds(2, 5, 3)),
        ("Ranker, INTERLEAVED: item, then action", kinds(2, 0, 0) + interleaved + kinds(0, 0, 3)),
        ("Retriever: the history alone", kinds(0, 5, 0)),
    )
    for place, (words, tokens) in enumerate(rows):
        y = 22 + 64 * place
        drawing.text(20, y + 14, words)
        end = row(drawing, 300, y, tokens)
        if not place:
            drawing.text(end + 12, y + 14, "item + action in one vector")
    for place in range(5):
        drawing.arrow(309 + CELL * place, 172, 309 + CELL * place, 190)
    drawing.text(300, 205, "each position predicts the item behind it")
    legend = (("contextual", CONTEXTUAL), ("event", HISTORY), ("action", ACTION), ("target", TARGET))
    for place, (words, color) in enumerate(legend):
        drawing.box(20 + 120 * place, 224, 12, 12, color)
        drawing.text(38 + 120 * place, 235, words)
    return drawing.svg()


def truncation_picture() -> str:
    """Draws a stack of two layer groups, the second of which keeps the newest 4 history tokens."""
    tokens = kinds(2, 10, 2)
    kept = set(sample(2, 10, 2).truncate(4).index.tolist())
    drawing = Drawing(560, 220, "Truncation between two groups of layers")
    drawing.text(20, 36, "layers 3 and 4, tail_len: 4")
    drawing.text(20, 116, "layers 1 and 2, all tokens")
    drawing.text(20, 190, "sequence")
    for place, (label, color) in enumerate(tokens):
        x = 240 + CELL * place
        drawing.token(x, 102, label, color)
        drawing.token(x, 176, label, color)
        drawing.arrow(x + 9, 172, x + 9, 124)
        if place in kept:
            drawing.token(x, 22, label, color)
            drawing.arrow(x + 9, 98, x + 9, 44)
    return drawing.svg()


def channels_picture() -> str:
    """Draws a history as two channels, each with its own stack."""
    drawing = Drawing(700, 210, "A mixture of two channels")
    events = [(str(number), HISTORY) for number in range(1, 9)]
    clicked, watched = [events[i] for i in (0, 2, 3, 6)], [events[i] for i in (1, 3, 5, 6, 7)]
    drawing.text(20, 96, "history", bold=True)
    row(drawing, 20, 104, events)
    for y, words, part in ((30, "clicked", clicked), (140, "watched for 30 s", watched)):
        drawing.text(240, y - 6, words, bold=True)
        end = row(drawing, 240, y, [*kinds(2, 0, 0), *part, *kinds(0, 0, 2)])
        drawing.arrow(end + 6, y + 9, 470, y + 9)
        drawing.box(472, y - 12, 84, 42, FAINT)
        drawing.text(514, y + 14, "its stack", anchor="middle")
        drawing.arrow(558, y + 9, 590, y + 9)
    drawing.box(592, 26, 90, 138, FAINT)
    drawing.text(637, 88, "side by side,", anchor="middle")
    drawing.text(637, 106, "one linear", anchor="middle")
    drawing.text(637, 124, "layer", anchor="middle")
    return drawing.svg()


def stages(drawing: Drawing, y: float, boxes: Sequence[tuple[str, str]], width: int, gap: int) -> None:
    """Draws boxes with two lines of text each, joined by arrows."""
    for place, (name, about) in enumerate(boxes):
        x = 16 + (width + gap) * place
        drawing.box(x, y, width, 58, FAINT, edge=HISTORY)
        drawing.text(x + width / 2, y + 25, name, anchor="middle", bold=True)
        drawing.text(x + width / 2, y + 44, about, anchor="middle")
        if place:
            drawing.arrow(x - gap + 3, y + 29, x - 3, y + 29)


def pipeline_picture() -> str:
    """Draws the commands from an event log to recommendations."""
    drawing = Drawing(860, 150, "From an event log to recommendations")
    boxes = (
        ("event log", "csv, parquet"),
        ("prepare", "rows, vocabulary"),
        ("train", "states, report"),
        ("evaluate", "metrics on test"),
        ("export", "one package"),
        ("predict", "your own ids"),
    )
    stages(drawing, 20, boxes, 122, 18)
    drawing.box(156, 104, 542, 30, PAPER, edge=TARGET)
    words = "one text .config: data, features, model, training, export"
    drawing.text(427, 124, words, anchor="middle", fill=INK)
    for x in (357, 497, 637):
        drawing.arrow(x, 104, x, 81)
    return drawing.svg()


def families_picture() -> str:
    """Draws the models: a ranker scores given candidates, a retriever searches the catalogue."""
    drawing = Drawing(720, 190, "Ranking and retrieval")
    for y, name, boxes in (
        (30, "Ranker", (("user, history,", "candidates"), ("mixer", "one pass"), ("head", "a score a task"))),
        (
            118,
            "Retriever",
            (("history", "of the user"), ("mixer", "one pass"), ("all items", "inner product, top k")),
        ),
    ):
        drawing.text(16, y - 8, name, bold=True)
        stages(drawing, y, boxes, 190, 40)
    return drawing.svg()


def caching_picture() -> str:
    """Draws cached scoring: the history once, then candidates in pieces."""
    drawing = Drawing(660, 190, "Scoring with a cache")
    drawing.text(20, 28, "1. prefill: user and history, once", bold=True)
    end = row(drawing, 20, 40, kinds(2, 8, 0))
    drawing.arrow(end + 8, 49, 300, 49)
    drawing.box(304, 30, 150, 40, FAINT, edge=HISTORY)
    drawing.text(379, 55, "keys and values", anchor="middle")
    drawing.text(20, 104, "2. candidates, a piece at a time", bold=True)
    for place in range(3):
        row(drawing, 20 + 90 * place, 116, kinds(0, 0, 3))
    drawing.arrow(280, 125, 379, 125)
    drawing.arrow(385, 125, 480, 125)
    drawing.arrow(382, 72, 382, 118)
    drawing.text(490, 130, "the scores of one pass")
    drawing.text(
        20, 172, "A candidate sees its user's tokens and itself, so pieces do not change each other."
    )
    return drawing.svg()


def pictures() -> Iterator[tuple[str, str]]:
    """Yields name and content of every file."""
    yield "pipeline", pipeline_picture()
    yield "sequence", sequence_picture()
    yield "families", families_picture()
    yield "truncation", truncation_picture()
    yield "channels", channels_picture()
    yield "caching", caching_picture()
    yield "mask-full", mask_picture("Full: mask {}", AttentionMask())
    window = AttentionMask(window=3, prefix=1)
    yield "mask-window", mask_picture("mask { window: 3 prefix: 1 }", window)
    target_window = AttentionMask(window=3, prefix=1, target_window=True)
    yield "mask-target-window", mask_picture("... and target_window: true", target_window)
    groups = AttentionMask(target_group_size=2)
    yield "mask-target-groups", mask_picture("mask { target_group_size: 2 }", groups, targets=4, history=7)
    retrieval = AttentionMask(contextual_reads_history=False)
    yield "mask-retrieval", mask_picture("Retriever: history only, causal", retrieval, 0, 10, 0)


def differing() -> list[Path]:
    """Returns the files of docs/figures that are missing, stale or superfluous."""
    drawn = {FOLDER / f"{name}.svg": content for name, content in pictures()}
    stale = [
        path for path, content in drawn.items() if not path.is_file() or path.read_text("utf-8") != content
    ]
    return sorted(stale + [path for path in FOLDER.glob("*.svg") if path not in drawn])


def main(arguments: Sequence[str] | None = None) -> int:
    """Draws or checks; returns the exit code."""
    parser = argparse.ArgumentParser(description="Draws the pictures of docs/.", allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if a picture differs")
    if parser.parse_args(arguments).check:
        stale = differing()
        for path in stale:
            print(f"{path}: is not what python scripts/draw_docs.py draws", file=sys.stderr)
        return 1 if stale else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, content in pictures():
        (FOLDER / f"{name}.svg").write_text(content, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
