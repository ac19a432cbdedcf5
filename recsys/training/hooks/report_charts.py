"""Draws charts for `report.html` as inline SVG, without scripts, in light and dark, with values as tooltips.

All functions are pure: numbers in, text out. Colors and fonts are CSS classes in `report_page`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 380, 196
"""Size of a chart in SVG units; the page scales it."""

NUM_COLOURS = 6
MAX_POINTS = 600
MAX_HINTS = 120

_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 10, 14, 24


class Point(NamedTuple):
    """A step and the value after it; None where it is undefined."""

    step: int
    value: float | None


@dataclass(frozen=True)
class Curve:
    """One line of a chart.

    Attributes:
        name: text for the legend.
        points: points in the order of steps.
        marks: whether each point gets a dot, for values that are rarely measured.
    """

    name: str
    points: Sequence[Point]
    marks: bool = False


def line_chart(
    title: str,
    curves: Sequence[Curve],
    *,
    last_step: int,
    best_step: int | None = None,
    include: float | None = None,
) -> str:
    """Returns a `<figure>` with title, legend with last values, and the curves over steps.

    Args:
        title: plain text.
        curves: the curves; the first six have distinct colors.
        last_step: end of the step axis, which begins at 0, so that charts can be compared by eye.
        best_step: step that a vertical line marks.
        include: a value that the value axis always covers and that is drawn as a line, such as 0 for a rate
            or 1 for a ratio.
    """
    shown = [Curve(curve.name, thinned(curve.points), curve.marks) for curve in curves]
    values = [point.value for curve in shown for point in curve.points if point.value is not None]
    head = f"<figcaption><b>{escape(title)}</b>{_legend(curves)}</figcaption>"
    if not values:
        return f'<figure class="chart">{head}<p class="empty">There is no defined value.</p></figure>'
    x = Axis(0.0, max(float(last_step), 1.0), _LEFT, WIDTH - _RIGHT)
    y = Axis.over([*values, *([] if include is None else [include])], HEIGHT - _BOTTOM, _TOP, pad=0.06)
    if include is not None and min(values) >= include:
        y = Axis(include, y.high, y.start, y.end)
    parts = [_grid(x, y, include)]
    if best_step is not None:
        parts.append(_best(x.place(best_step)))
    for index, curve in enumerate(shown):
        parts.append(_lines(index, curve.points, x, y))
        parts.append(_dots(index, curve, curve.name if len(shown) > 1 else title, x, y))
    label = escape(f"{title}, over steps")
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    return f'<figure class="chart">{head}{svg}</figure>'


class Pair(NamedTuple):
    """Mean prediction and observed rate of some candidates; None where undefined."""

    predicted: float | None
    observed: float | None
    candidates: int


def reliability_chart(title: str, bins: Sequence[Pair], below: str = "") -> str:
    """Returns a `<figure>` of observed rates over mean predictions, with the diagonal where both are equal.

    Args:
        title: plain text.
        bins: bins by rising prediction.
        below: HTML under the chart.
    """
    hint = '<span class="about">observed rate over mean prediction; on the dashed line both are equal</span>'
    head = f"<figcaption><b>{escape(title)}</b>{hint}</figcaption>"
    filled = [pair for pair in bins if pair.predicted is not None and pair.observed is not None]
    if not filled:
        return f'<figure class="chart">{head}<p class="empty">There is no defined value.</p>{below}</figure>'
    high = 1.06 * max(max(pair.predicted, pair.observed) for pair in filled) or 1.0
    x = Axis(0.0, high, _LEFT, WIDTH - _RIGHT)
    y = Axis(0.0, high, HEIGHT - _BOTTOM, _TOP)
    diagonal = f'x1="{_number(x.start)}" y1="{_number(y.start)}" x2="{_number(x.end)}" y2="{_number(y.end)}"'
    places = [(_number(x.place(pair.predicted)), _number(y.place(pair.observed))) for pair in filled]
    line = " ".join(f"{across},{up}" for across, up in places)
    dots = [
        f'<circle class="dot s0" cx="{across}" cy="{up}" r="3"><title>{pair.candidates:,} candidates: '
        f"predicted {number(pair.predicted)}, observed {number(pair.observed)}</title></circle>"
        for (across, up), pair in zip(places, filled, strict=True)
    ]
    parts = [
        _grid(x, y, None, whole=False),
        f'<line class="best" {diagonal}/><polyline class="curve s0" points="{line}"/>',
        *dots,
    ]
    label = escape(f"{title}, observed rate over mean prediction")
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    return f'<figure class="chart">{head}{svg}{below}</figure>'


def sparkline(points: Sequence[Point]) -> str:
    """Draws a tiny curve without axes for a table row; empty if fewer than two values are defined."""
    shown = thinned(points)
    defined = [(point.step, point.value) for point in shown if point.value is not None]
    if len(defined) < 2:
        return ""
    x = Axis.over([float(step) for step, _ in defined], 3, 117, pad=0.0)
    y = Axis.over([value for _, value in defined], 20, 4, pad=0.0)
    step, value = defined[-1]
    dot = f'<circle class="dot s0" {_center(x.place(step), y.place(value))} r="2.2"/>'
    return f'<svg class="spark" viewBox="0 0 120 24" aria-hidden="true">{_lines(0, shown, x, y)}{dot}</svg>'


def number(value: float | None) -> str:
    """Formats a value with about four significant digits, thousands separated; a dash if it is undefined."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        places = 3 - math.floor(math.log10(abs(value)))
        return f"{value:,.{min(max(places, 0), 4)}f}"
    return f"{value:.2e}"


def thinned(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Thins points to about `limit`: the lowest and highest of each stretch, so that no spike is lost."""
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
    """Maps values linearly to positions: `low` to `start`, `high` to `end`."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float, *, pad: float) -> "Axis":
        """Returns an axis that covers all values, with `pad` times their range as a margin at each end."""
        low, high = min(values), max(values)
        room = (high - low) * pad if high > low else abs(low) * 0.1 or 1.0
        return cls(low - room, high + room, start, end)

    def place(self, value: float) -> float:
        """Returns the position of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, *, whole: bool = False) -> list[float]:
        """Returns three to six round values inside the axis; with `whole`, only integers, possibly fewer."""
        rough = (self.high - self.low) / 6
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * 0.999)
        if whole:
            step = float(max(1, math.ceil(step)))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [place * step for place in range(first, last + 1)]


def _grid(x: Axis, y: Axis, include: float | None, *, whole: bool = True) -> str:
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    parts = []
    for value in y.ticks():
        place = _number(y.place(value))
        kind = "axis" if value == include else "grid"
        parts.append(f'<line class="{kind}" x1="{_LEFT}" x2="{right}" y1="{place}" y2="{place}"/>')
        text = f'x="{_LEFT - 7}" y="{place}" dy="0.32em" text-anchor="end"'
        parts.append(f'<text class="tick" {text}>{_tick(value)}</text>')
    for value in x.ticks(whole=whole):
        text = f'x="{_number(x.place(value))}" y="{bottom + 17}" text-anchor="middle"'
        parts.append(f'<text class="tick" {text}>{_tick(value)}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    return "".join(parts)


def _best(place: float) -> str:
    side, shift = ("end", -4) if place > WIDTH / 2 else ("start", 4)
    x = _number(place)
    line = f'<line class="best" x1="{x}" x2="{x}" y1="{_TOP - 8}" y2="{HEIGHT - _BOTTOM}"/>'
    text = f'<text class="tick" x="{_number(place + shift)}" y="{_TOP - 2}" text-anchor="{side}">best</text>'
    return line + text


def _dots(index: int, curve: Curve, name: str, x: Axis, y: Axis) -> str:
    """Draws circles that show their value as a tooltip; without `marks` a circle is visible only on hover."""
    kind = "dot" if curve.marks else "hint"
    stride, last = math.ceil(len(curve.points) / MAX_HINTS), len(curve.points) - 1
    parts = []
    for position, (step, value) in enumerate(curve.points):
        if value is not None and (position % stride == 0 or position == last):
            hint = f"<title>{escape(name)}: {number(value)} after step {step:,}</title>"
            place = _center(x.place(step), y.place(value))
            parts.append(f'<circle class="{kind} {_colour(index)}" {place} r="3">{hint}</circle>')
    return "".join(parts)


def _lines(index: int, points: Sequence[Point], x: Axis, y: Axis) -> str:
    """Draws a polyline for each stretch of defined values."""
    stretches: list[list[str]] = [[]]
    for step, value in points:
        if value is None:
            stretches.append([])
        else:
            stretches[-1].append(f"{_number(x.place(step))},{_number(y.place(value))}")
    dashes = " dashed" if index >= NUM_COLOURS else ""
    start = f'<polyline class="curve {_colour(index)}{dashes}" points="'
    return "".join(f'{start}{" ".join(stretch)}"/>' for stretch in stretches if len(stretch) > 1)


def _legend(curves: Sequence[Curve]) -> str:
    """Returns names with their last values. A single curve, whose name is the title, shows its value only."""
    parts = []
    for index, curve in enumerate(curves):
        last = next((point.value for point in reversed(curve.points) if point.value is not None), None)
        name = f"{escape(curve.name)} " if len(curves) > 1 else ""
        about = "" if len(curves) > 1 else " at the end"
        parts.append(
            f'<span class="key"><i class="{_colour(index)}"></i>{name}<em>{number(last)}</em>{about}</span>'
        )
    return "".join(parts)


def _colour(index: int) -> str:
    return f"s{index % NUM_COLOURS}"


def _center(x: float, y: float) -> str:
    return f'cx="{_number(x)}" cy="{_number(y)}"'


def _tick(value: float) -> str:
    size = abs(value)
    for scale, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= scale:
            return f"{value / (1e3 if suffix == 'k' else scale):g}{suffix}"
    return f"{float(f'{value:.6g}'):g}".replace("e-0", "e-")


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
