"""The page is read back: numbers of curves through the tick labels, as a person would."""

import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from recsys.training.diagnostics import DiagnosticResults
from recsys.training.hooks import Diagnosed, Evaluated, Outcome, Run, Trained
from recsys.training.hooks.metrics_file import MetricsFile
from recsys.training.hooks.report import NAME, Report, build, start_facts
from recsys.training.hooks.report_page import Share
from recsys.training.hooks.report_tested import update_report
from recsys.training.state import Best
from recsys.training.throughput import Rates

START = {"started": "2026-11-24 01:02 UTC", "command": "python -m recsys.train --config x.config"}
SHARES = [Share("computing steps", 30.0), Share("waiting for data", 10.0)]


def train_record(step, **changes):
    record = {
        "kind": "train",
        "step": step,
        "epoch": 0,
        "loss": 2.0 / step,
        "losses": {"click": 1.0 / step, "like": 0.5 / step},
        "lr": {"dense": 1e-3 * step, "sparse": 0.02},
        "grad_norm": 1.5,
        "samples_per_s": 100.0 + step,
        "tokens_per_s": 5000.0,
        "tflop_per_s": 0.002,
        "mfu": None,
        "data_wait": 0.25,
        "memory_bytes": 3 * 2**29,
    }
    return record | changes


def evaluation(step, metrics, best=False):
    return {"kind": "evaluation", "step": step, "metrics": metrics, "best": best, "seconds": 1.0}


RECORDS = [
    *(train_record(step) for step in (10, 20, 30)),
    evaluation(
        30, {"click/auc": 0.625, "like/auc": None, "loss": 0.5, "loss/click": 0.25, "loss/like": 0.75}
    ),
    *(train_record(step) for step in (40, 50, 60)),
    evaluation(
        60, {"click/auc": 0.75, "like/auc": 0.5, "loss": 0.4, "loss/click": 0.2, "loss/like": 0.6}, True
    ),
    train_record(70),
    evaluation(70, {"click/auc": 0.7, "like/auc": 0.55, "loss": 0.45, "loss/click": 0.22, "loss/like": 0.68}),
]


def a_run(folder, **changes):
    values = {"config_text": "train {\n}\n", "first_step": 0, "total_steps": 70, "facts": {"device": "cpu"}}
    return Run(folder=Path(folder), **(values | changes))


def an_outcome(best=None, **changes):
    values = {"step": 70, "reason": "all 70 steps are done", "checkpoint": Path("c"), "best": best}
    return Outcome(**(values | changes))


def page_of(records, folder="runs/first", **changes):
    best = Best("click/auc", 0.75, 60)
    return build(a_run(folder, **changes), records, an_outcome(best), SHARES, START)


class Balanced(HTMLParser):
    """Fails on a tag that is not closed in order; collects tags, attributes and texts."""

    VOID = {"meta", "link", "img", "br", "hr", "input", "!doctype"}

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes <{self.open[-1:]}>"
        self.open.pop()

    def handle_data(self, data):
        self.texts.append(data)


def chart(html, title):
    """The SVG of the chart with this title."""
    figure = next(f for f in re.findall(r"<figure.*?</figure>", html, re.S) if f"<b>{title}</b>" in f)
    return ElementTree.fromstring(re.search(r"<svg.*?</svg>", figure, re.S).group())


def scale(svg, anchor, axis):
    """Maps positions to values by the outermost tick labels."""
    labels = [t for t in svg.iter("text") if t.get("text-anchor") == anchor and t.text != "best"]
    low, high = ((float(t.get(axis)), float(t.text.replace("k", "000"))) for t in (labels[0], labels[-1]))
    return lambda place: low[1] + (place - low[0]) / (high[0] - low[0]) * (high[1] - low[1])


def points_of(svg, curve):
    """(step, value) of every point of the curves with a colour."""
    step, value = scale(svg, "middle", "x"), scale(svg, "end", "y")
    results = []
    for line in (line for line in svg.iter("polyline") if curve in line.get("class").split()):
        for pair in line.get("points").split():
            x, y = map(float, pair.split(","))
            results.append((round(step(x)), value(y)))
    return results


def rows_of(html, css):
    table = re.search(rf'<table class="{css}"[^>]*>.*?</table>', html, re.S).group()
    rows = re.findall(r"<tr>.*?</tr>", table, re.S)
    return [[re.sub(r"<[^>]+>", "", c) for c in re.findall(r"<t[hd].*?</t[hd]>", r, re.S)] for r in rows]


def test_curves_have_the_numbers_of_the_file():
    html = page_of(RECORDS)
    train = [record for record in RECORDS if record["kind"] == "train"]
    for title, key in (("loss", lambda r: r["loss"]), ("like", lambda r: r["losses"]["like"])):
        points = points_of(chart(html, title), "s0")
        assert [step for step, _ in points] == [record["step"] for record in train]
        assert [value for _, value in points] == pytest.approx([key(r) for r in train], abs=2e-4)
    validation = points_of(chart(html, "loss"), "s1")
    assert validation == [(30, pytest.approx(0.5, abs=2e-4)), (60, pytest.approx(0.4, abs=2e-4)),
                          (70, pytest.approx(0.45, abs=2e-4))]  # fmt: skip
    assert points_of(chart(html, "learning rate, dense"), "s0")[-1] == (70, pytest.approx(0.07, abs=1e-3))
    assert points_of(chart(html, "samples per second"), "s0")[0] == (10, pytest.approx(110, abs=1))
    assert points_of(chart(html, "waiting for data, % of a step"), "s0")[0] == (
        10,
        pytest.approx(25, abs=0.2),
    )
    assert points_of(chart(html, "useful GFLOP per second"), "s0")[0] == (10, pytest.approx(2, abs=0.02))
    assert points_of(chart(html, "peak memory so far, GiB"), "s0")[0] == (10, pytest.approx(1.5, abs=0.02))
    assert "of the device" not in html, "a share of an unknown peak has no chart"


def test_a_chart_has_a_curve_for_each_task_and_an_undefined_value_is_a_gap():
    svg = chart(page_of(RECORDS), "auc")
    assert [step for step, _ in points_of(svg, "s0")] == [30, 60, 70]
    assert [step for step, _ in points_of(svg, "s1")] == [60, 70]
    hints = [title.text for title in svg.iter("title")]
    assert "click: 0.6250 after step 30" in hints
    assert not any(hint.startswith("like") and "step 30" in hint for hint in hints)


def test_the_best_evaluation_is_marked_where_it_was():
    svg = chart(page_of(RECORDS), "auc")
    line = next(line for line in svg.iter("line") if line.get("class") == "best")
    assert scale(svg, "middle", "x")(float(line.get("x1"))) == pytest.approx(60, abs=0.2)


def test_the_table_has_every_metric_by_task_at_the_best_and_at_the_last_step():
    rows = rows_of(page_of(RECORDS), "metrics")
    assert rows[0] == ["task", "metric", "best, step 60", "last, step 70", "over steps"]
    assert rows[1][:4] == ["click", "aucselects the best state", "0.7500", "0.7000"]
    assert rows[2][:3] == ["loss", "0.2000", "0.2200"]
    assert rows[3][:4] == ["like", "auc", "0.5000", "0.5500"]
    assert rows[5][:4] == ["all", "loss", "0.4000", "0.4500"]
    assert len(rows) == 6


def test_an_undefined_metric_is_a_dash():
    html = page_of([RECORDS[0], evaluation(30, {"click/auc": None, "loss": 0.5}, True)])
    assert rows_of(html, "metrics")[0] == ["task", "metric", "best, step 30", "over steps"]
    assert rows_of(html, "metrics")[1][2:] == ["–", ""]
    assert "There is no defined value." in html


def test_metrics_without_a_task_share_a_chart_by_kind():
    metrics = {"hit_rate@10": 0.25, "hit_rate@50": 0.5, "mrr": 0.125, "loss": 7.0, "loss/next_item": 7.0}
    html = page_of([train_record(30, losses={"next_item": 7.0}), evaluation(30, metrics, True)])
    assert [t.text for t in chart(html, "hit_rate").iter("title")] == [
        "hit_rate@10: 0.2500 after step 30",
        "hit_rate@50: 0.5000 after step 30",
    ]
    names = [row[-3] for row in rows_of(html, "metrics")[1:]]
    assert names == ["hit_rate@10", "hit_rate@50", "mrr", "loss"], "a single task's loss is not told twice"


def test_nothing_is_fetched_or_run():
    html = page_of(RECORDS)
    page = Balanced(html)
    assert "script" not in page.tags and "link" not in page.tags
    assert not [a for a in page.attributes if a[0] in ("src", "href") or a[0].startswith("on")]
    assert "http" not in html and "url(" not in html and "@import" not in html


def test_text_of_users_stays_text():
    evil = '</pre><script>alert("1")</script> & <b>'
    records = [
        train_record(10, losses={"<i>a": 1.0, "b&amp;": 2.0}, lr={'"><x>': 0.1}),
        evaluation(10, {"<u>t/auc": 0.5, "loss": 1.0}, True),
    ]
    run = a_run("runs/<s>", config_text=evil, facts={"<q>": "<w>"})
    outcome = an_outcome(Best("<u>t/auc", 0.5, 10), reason="a < b")
    page = Balanced(build(run, records, outcome, [Share("<z>", 1.0)], {"command": "<c>"}))
    assert not {"script", "i>a", "x", "u", "s", "q", "w", "z"} & set(page.tags)
    for text in (evil, "<i>a", "b&amp;", "<u>t", "<s>", "<q>", "<w>", "<z>"):
        assert any(text in shown for shown in page.texts), text


def test_an_error_before_the_first_record_still_leaves_a_page(tmp_path):
    report = Report()
    report.started(a_run(tmp_path))
    report.close()
    html = (tmp_path / NAME).read_text()
    Balanced(html)
    assert "Stopped after step 0 of 70: an error occurred." in html
    assert "The run ended before anything was logged." in html
    assert "train {" in html


def test_nothing_is_written_for_a_run_that_never_started(tmp_path):
    Report().close()
    assert not list(tmp_path.iterdir())


def test_a_continued_run_shows_all_its_steps(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS[:3]))
    hooks = [MetricsFile(), Report()]
    rates = Rates(batches_per_s=1.0, samples_per_s=50.0, tokens_per_s=700.0, data_wait=0.5)
    losses = {"click": 0.1, "like": 0.2}
    for hook in hooks:
        hook.started(a_run(tmp_path, first_step=30))
        hook.stepped(40)
        hook.trained(Trained(40, 1, 0.125, losses, {"dense": 0.1}, 1.0, rates, 3.0))
        hook.evaluated(Evaluated(40, {"click/auc": 0.6, "loss": 0.3}, True, 2.0))
        hook.finished(
            an_outcome(Best("click/auc", 0.6, 40), step=40, reason="signal 15 stopped the run", signal=15)
        )
        hook.close()
    html = (tmp_path / NAME).read_text()
    assert [step for step, _ in points_of(chart(html, "loss"), "s0")] == [10, 20, 30, 40]
    assert "Stopped after step 40 of 70: signal 15 stopped the run. Continued from step 30." in html
    assert "Since the last start, at step 30." in html


def test_a_closer_look_has_its_sections():
    record = {"kind": "diagnostics", "step": 60, "slices": [], "calibration": {}}
    slices = [{"history": [0, 0], "rows": 5, "candidates": 6, "metrics": {"click/auc": 0.5}}]
    bins = [{"candidates": 6, "predicted": 0.25, "observed": 0.5}]
    html = page_of([*RECORDS, record | {"slices": slices, "calibration": {"click": bins}}])
    Balanced(html)
    heads = re.findall(r"<h2>(.*?)</h2>", html)
    place = heads.index("Validation metrics by length of history")
    assert heads[place + 1] == "Calibration"
    assert "the best state, step 60" in html


def test_time_is_split_by_what_it_went_to(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    rates = Rates(batches_per_s=1.0, samples_per_s=50.0, tokens_per_s=700.0, data_wait=0.25)
    report = Report()
    report.started(a_run(tmp_path))
    for step, seconds in ((1, 8.0), (2, 4.0)):
        now += seconds
        report.stepped(step)
    report.trained(Trained(2, 0, 1.0, {"click": 1.0}, {"dense": 0.1}, 1.0, rates, 3.0))
    now += 4.0
    report.evaluated(Evaluated(2, {"loss": 1.0}, True, 6.0))
    now += 2.0
    report.diagnosed(Diagnosed(2, DiagnosticResults([], {})))
    now += 1.0
    report.saved(tmp_path)
    now += 1.0
    report.stepped(3)
    report.finished(an_outcome(step=3))
    rows = rows_of((tmp_path / NAME).read_text(), "shares")
    assert rows == [
        ["computing steps", "10.0 s", "50.0 %"],
        ["waiting for data", "3.0 s", "15.0 %"],
        ["evaluation", "6.0 s", "30.0 %"],
        ["saving", "1.0 s", "5.0 %"],
    ]


def test_the_page_says_when_and_by_which_command_the_run_was_started():
    facts = dict(row for row in rows_of(page_of(RECORDS), "facts") if len(row) == 2)
    assert facts["started"] == START["started"]
    assert facts["command"] == START["command"]


def test_a_start_is_described(monkeypatch):
    monkeypatch.setattr("sys.orig_argv", ["/usr/bin/python3", "-m", "recsys.train", "--run-dir", "a b"])
    facts = start_facts()
    assert facts["command"] == "python3 -m recsys.train --run-dir 'a b'"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", facts["started"])


def test_metrics_of_a_later_evaluation_are_added_to_the_page(tmp_path):
    path = tmp_path / NAME
    path.write_text(page_of(RECORDS, folder=tmp_path))
    update_report(path)
    assert "Metrics of recsys.evaluate" not in path.read_text()
    written = {"checkpoint": "step-00000060", "metrics": {"click/auc": 0.625, "loss": None}}
    (tmp_path / "test_metrics.json").write_text(json.dumps(written))
    (tmp_path / "validation_metrics.json").write_text('{"metrics": "damaged"}')
    for auc in (0.625, 0.75):
        written["metrics"]["click/auc"] = auc
        (tmp_path / "test_metrics.json").write_text(json.dumps(written))
        update_report(path)
        html = path.read_text()
        Balanced(html)
        assert rows_of(html, "tested") == [
            ["metric", "test, step 60"],
            ["click/auc", f"{auc:.4f}"],
            ["loss", "–"],
        ]
    # A run that goes on writes the page anew, with the metrics that are there.
    assert rows_of(page_of(RECORDS, folder=tmp_path), "tested") == rows_of(html, "tested")


def test_a_report_of_an_earlier_version_stays_as_it_is(tmp_path):
    (tmp_path / NAME).write_text("<html></html>")
    (tmp_path / "test_metrics.json").write_text('{"metrics": {"loss": 1.0}}')
    update_report(tmp_path / NAME)
    assert (tmp_path / NAME).read_text() == "<html></html>"
    update_report(tmp_path / "missing.html")
    assert not (tmp_path / "missing.html").exists()


def test_damaged_files_beside_the_page_are_named_and_left_out(tmp_path, caplog):
    path = tmp_path / NAME
    path.write_text(page_of(RECORDS, folder=tmp_path))
    for name, text in (("test", "[" * 100_000), ("validation", '{"checkpoint": "\\ud800", "metrics": {}}')):
        (tmp_path / f"{name}_metrics.json").write_text(text)
    update_report(path)
    assert "Metrics of recsys.evaluate" not in path.read_text()
    assert "test_metrics.json: damaged (nested too deeply), so the report leaves it out" in caplog.text
    assert "validation_metrics.json: damaged ('\\ud800' in it, which is not a character)" in caplog.text
    damaged = path.read_text().encode("utf-16")
    path.write_bytes(damaged)
    update_report(path)
    assert path.read_bytes() == damaged
    assert f"{path}: damaged ('utf-8' codec" in caplog.text
