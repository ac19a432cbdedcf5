"""The part of `report.html` that `recsys.evaluate` adds after training: metrics of each evaluated split."""

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from recsys import files
from recsys.training.hooks.report_charts import number
from recsys.training.hooks.report_page import card, section

_BEGIN, _END = "<!-- evaluated splits -->", "<!-- end of evaluated splits -->"
SPLITS = ("test", "validation", "train")
SUFFIX = "_metrics.json"
"""`recsys.evaluate` writes `<split>_metrics.json` into the run folder."""


def tested_section(folder: Path) -> str:
    """Returns the section of all splits that were evaluated; only its marks before the first evaluation."""
    records = {split: record for split in SPLITS if (record := _read(folder / (split + SUFFIX)))}
    return f"{_BEGIN}{_section(records) if records else ''}{_END}"


def update_report(path: Path) -> None:
    """Writes the newest metrics of `recsys.evaluate` into a report, if it has a place for them."""
    if not path.is_file():
        return
    text = path.read_text(encoding="utf-8")
    before, mark, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if mark and end:
        files.write_text(path, before + tested_section(path.parent) + after)


def _section(records: Mapping[str, Mapping[str, Any]]) -> str:
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


def _state(record: Mapping[str, Any]) -> str:
    name = str(record.get("checkpoint", ""))
    digits = name.rpartition("-")[2].lstrip("0") or "0"
    return f"step {int(digits):,}" if digits.isdecimal() else name


def _read(path: Path) -> dict[str, Any] | None:
    """Reads the file of a split; None if it is missing or damaged, as the report can do without it."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    whole = isinstance(record, dict) and isinstance(record.get("metrics"), dict)
    valid = whole and all(
        value is None or isinstance(value, int | float) for value in record["metrics"].values()
    )
    return record if valid else None
