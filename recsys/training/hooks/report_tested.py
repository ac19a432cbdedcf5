"""Builds the part of `report.html` that `recsys.evaluate` adds: metrics of each evaluated split."""

import logging
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TypedDict

from recsys import files, typed_json
from recsys.training.hooks.report_charts import number
from recsys.training.hooks.report_page import card, section

_BEGIN, _END = "<!-- evaluated splits -->", "<!-- end of evaluated splits -->"
SPLITS = ("test", "validation", "train")
SUFFIX = "_metrics.json"
"""`recsys.evaluate` writes `<split>_metrics.json` into the run folder."""

log = logging.getLogger(__name__)


class _Tested(TypedDict):
    checkpoint: str
    metrics: dict[str, float | None]


def tested_section(folder: Path) -> str:
    """Returns the section of all evaluated splits; before the first evaluation, only its empty markers."""
    records = {split: record for split in SPLITS if (record := _read(folder / (split + SUFFIX)))}
    return f"{_BEGIN}{_section(records) if records else ''}{_END}"


def update_report(path: Path) -> None:
    """Writes the newest metrics of `recsys.evaluate` into a report, if it has a place for them."""
    if not path.is_file():
        return
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        log.warning("%s: damaged (%s), so it does not show the new metrics; remove it", path, error)
        return
    before, mark, after_mark = text.partition(_BEGIN)
    _, end, after = after_mark.partition(_END)
    if mark and end:
        files.write_text(path, before + tested_section(path.parent) + after)


def _section(records: Mapping[str, _Tested]) -> str:
    names = dict.fromkeys(name for record in records.values() for name in record["metrics"])
    heads = "".join(
        f'<th class="n">{escape(split)}, {escape(_state(record))}</th>' for split, record in records.items()
    )
    rows = "".join(
        f"<tr><td>{escape(name)}</td>"
        + "".join(f'<td class="n">{number(record["metrics"].get(name))}</td>' for record in records.values())
        + "</tr>"
        for name in names
    )
    table = (
        f'<table class="tested"><thead><tr><th>metric</th>{heads}</tr></thead><tbody>{rows}</tbody></table>'
    )
    return section("Metrics of recsys.evaluate", card(table))


def _state(record: _Tested) -> str:
    digits = record["checkpoint"].removeprefix("step-")
    return f"step {int(digits):,}" if digits.isdecimal() and len(digits) < 16 else record["checkpoint"]


def _read(path: Path) -> _Tested | None:
    """Reads the file of a split; None if it is missing or, with a warning, if it is damaged."""
    if not path.exists():
        return None
    try:
        return typed_json.parse(path.read_bytes(), _Tested)
    except (OSError, ValueError, TypeError) as error:
        log.warning("%s: damaged (%s), so the report leaves it out; run recsys.evaluate again", path, error)
        return None
