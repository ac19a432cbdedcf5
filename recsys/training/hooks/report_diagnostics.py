"""Builds the part of `report.html` on diagnostics: slices by length of history, and calibration."""

from collections import defaultdict
from collections.abc import Sequence
from html import escape
from typing import Any

from recsys.training.hooks.report_charts import Pair, number, reliability_chart
from recsys.training.hooks.report_page import card, folded, grid, section

Record = dict[str, Any]
"""A line of `metrics.jsonl`."""


def diagnostics_sections(records: Sequence[Record], best_step: int | None) -> list[str]:
    """Returns sections about the best state, and folded ones about the last state if it is not the best.

    Args:
        records: records of `metrics.jsonl`; of two records about the same step, the later counts.
        best_step: step of the best evaluation; None if there is none.
    """
    by_step = {record["step"]: record for record in records if record["kind"] == "diagnostics"}
    if not by_step:
        return []
    last = max(by_step)
    shown = best_step if best_step in by_step else last
    parts = _sections(by_step[shown], "the best state" if shown == best_step else "the last state")
    if last != shown:
        last_sections = "".join(_sections(by_step[last], "the last state"))
        parts.append(folded(f"The same for the last state, step {last:,}", last_sections))
    return parts


def split_name(name: str) -> tuple[str, str]:
    """Splits a name such as `is_click/auc` or `loss/is_click` into task and metric; without task: ""."""
    first, _, second = name.partition("/")
    if not second:
        return "", name
    return (second, first) if first == "loss" else (first, second)


def _sections(record: Record, state: str) -> list[str]:
    note = f"Validation rows; {state}, step {record['step']:,}."
    parts = []
    if record["slices"] and record["slices"][0]["metrics"]:
        table = card(_slice_table(record["slices"]))
        parts.append(section("Validation metrics by length of history", table, note))
    if record["calibration"]:
        charts = grid([_calibration(task, bins) for task, bins in record["calibration"].items()])
        told = f"{note} Candidates in order of their predictions, in bins of about equal size."
        parts.append(section("Calibration", charts, told))
    return parts


def _slice_table(slices: Sequence[Record]) -> str:
    """Returns a table with a row per metric and a column per slice; each head shows the slice's size."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in slices[0]["metrics"]:
        groups[split_name(name)[0]].append(name)
    corner = "<th>task</th><th>metric</th>" if any(groups) else "<th>metric</th>"
    heads = "".join(f'<th class="n">{_slice_head(part)}</th>' for part in slices)
    rows = [f"<thead><tr>{corner}{heads}</tr></thead>"]
    for task, names in groups.items():
        first = f'<th class="group" rowspan="{len(names)}">{escape(task)}</th>' if any(groups) else ""
        rows.append("<tbody>")
        for name in names:
            cells = "".join(f'<td class="n">{number(part["metrics"].get(name))}</td>' for part in slices)
            rows.append(f"<tr>{first}<td>{escape(split_name(name)[1])}</td>{cells}</tr>")
            first = ""
        rows.append("</tbody>")
    return f'<table class="slices" tabindex="0">{"".join(rows)}</table>'


def _slice_head(record: Record) -> str:
    shortest, longest = record["history"]
    events = "no events" if longest == 0 else f"{shortest:,}–{longest:,} events"
    rows, candidates = _count(record["rows"], "row"), _count(record["candidates"], "candidate")
    return f"{events}<small>{rows}</small><small>{candidates}</small>"


def _count(value: int, name: str) -> str:
    return f"{value:,} {name}{'' if value == 1 else 's'}"


def _calibration(task: str, bins: Sequence[Record]) -> str:
    rows = "".join(
        f'<tr><td class="n">{pair["candidates"]:,}</td><td class="n">{number(pair["predicted"])}</td>'
        f'<td class="n">{number(pair["observed"])}</td></tr>'
        for pair in bins
    )
    heads = "".join(
        f'<th class="n">{head}</th>' for head in ("candidates", "mean prediction", "observed rate")
    )
    table = f'<table class="bins"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
    pairs = [Pair(pair["predicted"], pair["observed"], pair["candidates"]) for pair in bins]
    return reliability_chart(task, pairs, folded(_count(len(bins), "bin"), table))
