import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys.training.hooks.report_charts import Axis, Curve, Point, line_chart, number, sparkline, thinned

finite = st.floats(min_value=-1e9, max_value=1e9, allow_subnormal=False)


@given(st.lists(finite, min_size=1, max_size=20))
def test_an_axis_holds_its_values_and_has_round_ticks(values):
    axis = Axis.over(values, 0.0, 100.0, pad=0.06)
    assert all(-1e-6 <= axis.place(value) <= 100 + 1e-6 for value in values)
    span = axis.high - axis.low
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 7
    assert all(axis.low - 1e-6 * span <= tick <= axis.high + 1e-6 * span for tick in ticks)
    step = ticks[1] - ticks[0]
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-9)
    assert min(abs(mantissa - round_one) for round_one in (1, 2, 2.5, 5, 10)) < 1e-3


def test_ticks_of_steps_are_whole():
    assert Axis(0.0, 3.0, 0.0, 1.0).ticks(whole=True) == [0, 1, 2, 3]
    assert Axis(0.0, 480.0, 0.0, 1.0).ticks(whole=True) == [0, 100, 200, 300, 400]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (math.nan, "–"),
        (math.inf, "–"),
        (0.0, "0"),
        (0.71881, "0.7188"),
        (0.0135, "0.0135"),
        (-1.0199, "-1.020"),
        (18.7656, "18.77"),
        (1760.4487, "1,760"),
        (99999.0, "99,999"),
        (123456.0, "1.23e+05"),
        (0.00042, "4.20e-04"),
    ],
)
def test_numbers_for_people(value, text):
    assert number(value) == text


def test_thinning_keeps_spikes_both_ends_and_the_order():
    points = [Point(step, float(step % 7)) for step in range(10_000)]
    points[4321] = Point(4321, 1e6)
    points[8765] = Point(8765, -1e6)
    points[5000] = Point(5000, None)
    kept = thinned(points, 600)
    assert len(kept) <= 601
    assert {points[4321], points[8765], points[-1]} <= set(kept)
    assert [point.step for point in kept] == sorted(point.step for point in kept)
    assert thinned(points[:600], 600) == points[:600]


def test_a_long_run_makes_a_small_chart():
    points = [Point(step, math.sin(step)) for step in range(100_000)]
    assert len(line_chart("loss", [Curve("training", points)], last_step=100_000)) < 60_000


def test_one_value_and_equal_values_are_drawn_inside():
    for points in ([Point(5, 2.0)], [Point(5, 2.0), Point(10, 2.0)], [Point(1, 0.0)]):
        html = line_chart("loss", [Curve("a", points, marks=True)], last_step=points[-1].step)
        places = [float(y) for y in re.findall(r'cy="([^"]+)"', html)]
        assert len(places) == len(points) and all(20 < place < 180 for place in places)
        assert "nan" not in html


def test_a_seventh_curve_differs_from_the_first_of_its_colour():
    curves = [Curve(str(n), [Point(1, float(n)), Point(2, float(n))]) for n in range(7)]
    classes = re.findall(r'<polyline class="([^"]+)"', line_chart("loss", curves, last_step=2))
    assert len(set(classes)) == 7


def test_an_included_value_is_on_the_axis():
    html = line_chart("calibration", [Curve("a", [Point(1, 0.8), Point(2, 0.9)])], last_step=2, include=1.0)
    assert '<line class="axis"' in html and ">1</text>" in html


def test_sparklines_need_two_values():
    assert sparkline([Point(1, 0.5), Point(2, None)]) == ""
    assert "polyline" in sparkline([Point(1, 0.5), Point(2, 0.6)])
