"""Line charts for `report.html`: inline SVG that needs no script, reads in light and dark, and tells its
values under the pointer.

Pure functions from numbers to text; colours and fonts are classes of `report_page`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 480, 230
"""Size of a chart in its own units; the page scales it."""

NUM_COLOURS = 6
MAX_POINTS = 600
MAX_HINTS = 120

_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 14, 26


class Point(NamedTuple):
    """A value after a step; None where it is undefined."""

    step: int
    value: float | None


@dataclass(frozen=True)
class Curve:
    """One line of a chart.

    Attributes:
        name: for the legend.
        points: in the order of steps.
        marks: a dot on each point, for values that are measured seldom.
    """

    name: str
    points: Sequence[Point]
    marks: bool = False


def line_chart(title: str, curves: Sequence[Curve], *, best_step: int | None = None, floor: float | None = None) -> str:
    """A `<figure>`: title, legend with last values, and the curves over steps.

    Args:
        title: plain text.
        curves: the first six have colours of their own.
        best_step: marked by a vertical line.
        floor: the value axis starts here at the latest; None lets it start at the smallest value.
    """
    shown = [Curve(curve.name, thinned(curve.points), curve.marks) for curve in curves]
    defined = [point for curve in shown for point in curve.points if point.value is not None]
    head = f'<figcaption><b>{escape(title)}</b>{"".join(map(_legend, range(len(curves)), curves))}</figcaption>'
    if not defined:
        return f'<figure class="chart">{head}<p class="empty">No value was defined.</p></figure>'
    values = [float(point.value) for point in defined if point.value is not None]
    x = Axis.over([float(point.step) for point in defined], _LEFT, WIDTH - _RIGHT, pad=0.0, whole=True)
    y = Axis.over(values + ([] if floor is None else [floor]), HEIGHT - _BOTTOM, _TOP, pad=0.06)
    if floor is not None and min(values) >= floor:
        y = Axis(floor, y.high, y.start, y.end)
    parts = [_grid(x, y)]
    if best_step is not None and x.low <= best_step <= x.high:
        parts.append(_marker(x.place(best_step)))
    parts += [_curve(number, curve, x, y) for number, curve in enumerate(shown)]
    label = escape(f"{title}, over steps", quote=True)
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    return f'<figure class="chart">{head}{svg}</figure>'


def sparkline(points: Sequence[Point]) -> str:
    """A tiny curve without axes for a row of a table; nothing when less than two values are defined."""
    shown = thinned(points)
    values = [point.value for point in shown if point.value is not None]
    if len(values) < 2:
        return ""
    x = Axis.over([float(point.step) for point in shown], 2, 88, pad=0.0)
    y = Axis.over(values, 20, 4, pad=0.0)
    last = next(point for point in reversed(shown) if point.value is not None)
    dot = f'<circle class="dot s0" cx="{_number(x.place(last.step))}" cy="{_number(y.place(last.value or 0.0))}" r="2"/>'
    return f'<svg class="spark" viewBox="0 0 92 24" aria-hidden="true">{_lines(0, shown, x, y)}{dot}</svg>'


def number(value: float | None) -> str:
    """A value for people: four significant digits, thousands separated, a dash when it is undefined."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        places = 0 if abs(value) >= 1000 else max(0, 3 - math.floor(math.log10(abs(value)))) if value else 0
        return f"{value:,.{min(places, 4)}f}"
    return f"{value:.2e}"


def thinned(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most about `limit` points: of each stretch the lowest and the highest, so that no spike is lost."""
    if len(points) <= limit:
        return list(points)
    stretch = math.ceil(2 * len(points) / limit)
    kept = []
    for begin in range(0, len(points), stretch):
        part = points[begin : begin + stretch]
        defined = [(point.value, place) for place, point in enumerate(part) if point.value is not None]
        ends = {min(defined)[1], max(defined)[1]} if defined else {0}
        kept += [part[place] for place in sorted(ends)]
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


@dataclass(frozen=True)
class Axis:
    """From values to places: `low` lies at `start`, `high` at `end`."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float, *, pad: float, whole: bool = False) -> "Axis":
        """An axis that holds all values, with a share of the range as room on both sides."""
        low, high = min(values), max(values)
        if low == high:
            room = 1.0 if whole or low == 0 else abs(low) * 0.1
            return cls(low - room, high + room, start, end)
        room = (high - low) * pad
        return cls(low - room, high + room, start, end)

    def place(self, value: float) -> float:
        """Where a value lies."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, count: int = 5, *, whole: bool = False) -> list[float]:
        """About `count` round values inside the axis."""
        rough = (self.high - self.low) / count
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * 0.999)
        if whole:
            step = float(max(1, round(step)))
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [place * step for place in range(first, last + 1)]


def _grid(x: Axis, y: Axis) -> str:
    rows = y.ticks(4)
    parts = []
    for value in rows:
        place = _number(y.place(value))
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{place}" y2="{place}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 7}" y="{place}" dy="0.32em" text-anchor="end">{_tick(value)}</text>')
    bottom = HEIGHT - _BOTTOM
    for value in x.ticks(5, whole=True):
        place = _number(x.place(value))
        parts.append(f'<text class="tick" x="{place}" y="{bottom + 17}" text-anchor="middle">{_tick(value)}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    return "".join(parts)


def _marker(place: float) -> str:
    side, shift = ("end", -4) if place > WIDTH - 60 else ("start", 4)
    line = f'<line class="best" x1="{_number(place)}" x2="{_number(place)}" y1="{_TOP - 6}" y2="{HEIGHT - _BOTTOM}"/>'
    text = f'<text class="tick" x="{_number(place + shift)}" y="{_TOP}" text-anchor="{side}">best</text>'
    return line + text


def _curve(index: int, curve: Curve, x: Axis, y: Axis) -> str:
    colour = f"s{index % NUM_COLOURS}"
    parts = [_lines(index, curve.points, x, y)]
    stride = math.ceil(len(curve.points) / MAX_HINTS)
    kind = "dot" if curve.marks else "hint"
    last = len(curve.points) - 1
    for position, (step, value) in enumerate(curve.points):
        if value is not None and (position % stride == 0 or position == last):
            hint = escape(f"{curve.name}: {number(value)} after step {step:,}")
            place = f'cx="{_number(x.place(step))}" cy="{_number(y.place(value))}"'
            parts.append(f'<circle class="{kind} {colour}" {place} r="3"><title>{hint}</title></circle>')
    return "".join(parts)


def _lines(index: int, points: Sequence[Point], x: Axis, y: Axis) -> str:
    """A polyline for each stretch of defined values."""
    stretches: list[list[str]] = [[]]
    for step, value in points:
        if value is None:
            stretches.append([])
        else:
            stretches[-1].append(f"{_number(x.place(step))},{_number(y.place(value))}")
    dashes = " dashed" if index >= NUM_COLOURS else ""
    start = f'<polyline class="curve s{index % NUM_COLOURS}{dashes}" points="'
    return "".join(f'{start}{" ".join(stretch)}"/>' for stretch in stretches if len(stretch) > 1)


def _legend(index: int, curve: Curve) -> str:
    last = next((point.value for point in reversed(curve.points) if point.value is not None), None)
    swatch = f'<i class="s{index % NUM_COLOURS}"></i>'
    return f'<span class="key">{swatch}{escape(curve.name)} <em>{number(last)}</em></span>'


def _tick(value: float) -> str:
    size = abs(value)
    for scale, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= scale:
            return f"{value / (1e3 if suffix == 'k' else scale):g}{suffix}"
    if size and size < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-")
    return f"{float(f'{value:.6g}'):g}"


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
