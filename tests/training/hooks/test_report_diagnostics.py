"""The sections about slices and calibration, read back as in `test_report`."""

import re

import pytest

from recsys.training.hooks.report_diagnostics import diagnostics_sections
from recsys.training.hooks.report_page import page
from tests.training.hooks.diagnostic_results import RESULTS
from tests.training.hooks.test_report import Balanced, chart, evaluation, rows_of, scale, train_record


def diagnosed(step, findings=None):
    actual = RESULTS.to_json() if findings is None else findings
    text = {"kind": "diagnostics", "step": step, **actual}
    return null(text)


def null(value):
    if isinstance(value, dict):
        return {key: null(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [null(entry) for entry in value]
    return None if value != value else value


def html_of(records, best_step):
    return page("t", diagnostics_sections(records, best_step))


def test_a_column_is_a_slice_with_what_is_in_it():
    rows = rows_of(html_of([diagnosed(60)], 60), "slices")
    assert rows[0] == [
        "task",
        "metric",
        "no events0 rows0 candidates",
        "1–10 events1 row2 candidates",
        "11–5,000 events1,500 rows4,000 candidates",
    ]
    assert rows[1] == ["click", "auc", "–", "–", "0.7500"]
    assert rows[2] == ["seconds", "mae", "–", "1.250", "2.500"]


def test_metrics_without_a_task_have_no_column_of_tasks():
    slice_record = {
        "history": [0, 0],
        "rows": 3,
        "candidates": 3,
        "metrics": {"mrr": 0.5, "hit_rate@10": None},
    }
    rows = rows_of(html_of([diagnosed(9, {"slices": [slice_record], "calibration": {}})], None), "slices")
    assert rows == [
        ["metric", "no events3 rows3 candidates"],
        ["mrr", "0.5000"],
        ["hit_rate@10", "–"],
    ]


def test_a_dot_is_a_bin_and_the_diagonal_is_where_both_are_equal():
    svg = chart(html_of([diagnosed(60)], 60), "click")
    across, up = scale(svg, "middle", "x"), scale(svg, "end", "y")
    points = [(across(float(dot.get("cx"))), up(float(dot.get("cy")))) for dot in svg.iter("circle")]
    bins = [(0.1, 0.2), (0.5, 0.4), (0.8, 1.0)]
    for point, expected in zip(points, bins, strict=True):
        assert point == pytest.approx(expected, abs=2e-3)
    (line,) = [line for line in svg.iter("line") if line.get("class") == "best"]
    for end in ("1", "2"):
        x, y = across(float(line.get(f"x{end}"))), up(float(line.get(f"y{end}")))
        assert x == pytest.approx(y, abs=2e-3)
    assert [dot[0].text for dot in svg.iter("circle")][1] == (
        "1,200 candidates: predicted 0.5000, observed 0.4000"
    )


def test_the_numbers_of_bins_are_there_for_those_without_a_pointer():
    rows = rows_of(html_of([diagnosed(60)], 60), "bins")
    assert rows[0] == ["candidates", "mean prediction", "observed rate"]
    assert rows[1:] == [
        ["400", "0.1000", "0.2000"],
        ["1,200", "0.5000", "0.4000"],
        ["300", "0.8000", "1.000"],
    ]


def test_the_best_state_is_shown_and_the_last_one_folded():
    empty = RESULTS.to_json() | {"calibration": {}}
    html = html_of([train_record(60), diagnosed(80), diagnosed(60, empty), evaluation(80, {})], 60)
    assert re.findall(r"<summary>(.*?)</summary>", html) == ["The same for the last state, step 80", "3 bins"]
    shown, folded = html.split("The same for the last state")
    assert "the best state, step 60" in shown and "Calibration" not in shown
    assert "the last state, step 80" in folded and "Calibration" in folded
    Balanced(html)


@pytest.mark.parametrize(
    ("best_step", "state"), [(80, "the best state"), (20, "the last state"), (None, "the last state")]
)
def test_one_state_is_told_once(best_step, state):
    html = html_of([diagnosed(80), diagnosed(80)], best_step)
    assert html.count("<h2>Calibration</h2>") == 1
    assert f"{state}, step 80" in html
    assert "The same for" not in html


def test_nothing_is_shown_without_a_closer_look():
    assert diagnostics_sections([train_record(10), evaluation(10, {"loss": 1.0})], 10) == []


def test_undefined_and_missing_bins_are_no_numbers():
    broken = [{"candidates": 3, "predicted": None, "observed": 0.5}]
    findings = {"slices": [], "calibration": {"click": broken, "like": []}}
    html = html_of([diagnosed(5, findings)], 5)
    assert html.count("There is no defined value.") == 2
    assert rows_of(html, "bins")[1] == ["3", "–", "0.5000"]
    assert "nan" not in html.lower()


@pytest.mark.parametrize(("predicted", "observed"), [(0.0, 0.0), (1.0, 0.0), (1e-4, 1.0)])
def test_one_class_has_a_chart(predicted, observed):
    bins = [{"candidates": 3, "predicted": predicted, "observed": observed}]
    svg = chart(html_of([diagnosed(5, {"slices": [], "calibration": {"click": bins}})], 5), "click")
    (dot,) = svg.iter("circle")
    assert scale(svg, "middle", "x")(float(dot.get("cx"))) == pytest.approx(predicted, abs=3e-3)
    assert scale(svg, "end", "y")(float(dot.get("cy"))) == pytest.approx(observed, abs=3e-3)


def test_text_of_users_stays_text():
    slice_record = {"history": [1, 2], "rows": 1, "candidates": 1, "metrics": {"<i>t/<b>m": 0.5}}
    bins = [{"candidates": 1, "predicted": 0.5, "observed": 1.0}]
    html = Balanced(html_of([diagnosed(5, {"slices": [slice_record], "calibration": {"<u>t": bins}})], 5))
    assert not {"i", "b>m", "u"} & set(html.tags)
    for text in ("<i>t", "<b>m", "<u>t"):
        assert any(text in shown for shown in html.texts), text


def test_the_page_has_no_column_wider_than_a_phone():
    html = page("t", [])
    for width in re.findall(r"minmax\((.*?), 1fr\)", html):
        assert width.startswith("min(") or int(width.removesuffix("px")) <= 160
    assert 'name="viewport" content="width=device-width' in html
