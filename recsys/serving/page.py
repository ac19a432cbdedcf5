"""A page that shows what the served package recommends to the users of a file, with the names of items.

It is plain HTML without scripts. Every text of a file or request is escaped.
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from recsys import protos as pb
from recsys.config import features
from recsys.data.arrow import first_line
from recsys.data.schema.contract import file_columns
from recsys.data.sources import open_source
from recsys.errors import ConfigError, DataError
from recsys.inference.rows import given_source

MAX_USERS = 10_000
"""Most rows of the file that are kept; the page says so."""

_LISTED, _HISTORY = 50, 20
"""Users that the page lists, and events that it shows."""

_STYLE = "body{font-family:sans-serif;margin:2em}td,th{padding:.2em 1em;text-align:left}"


class Page:
    """Rows of users and names of items.

    Args:
        pipeline: config of the package; the first of its key columns is the user.
        paths: files with rows, as for `recsys predict`.
        names: parquet or CSV file with the columns `id` and `name` of items; None to show ids only.

    Raises:
        ConfigError: the package has no key column.
        DataError: a file cannot be read.
    """

    def __init__(self, pipeline: pb.Pipeline, paths: Sequence[str], names: str | None) -> None:
        if not pipeline.data.key_columns:
            raise ConfigError("--page-rows: the package has no data.key_columns to find users by")
        self._user = pipeline.data.key_columns[0]
        self._item = _history_item(pipeline)
        self._rows = _read_rows(pipeline, paths, self._user)
        self._names = {} if names is None else _read_names(Path(names))

    def row(self, user: str) -> dict[str, Any] | None:
        """Returns the last row of a user, or None if there is none."""
        return self._rows.get(user)

    def html(self, user: str | None, answer: dict[str, Any] | None = None, error: str = "") -> str:
        """Returns the page.

        Args:
            user: the user that was asked for; None shows the form only.
            answer: the answer to the row of the user, as a client gets it.
            error: what to say instead of an answer.
        """
        parts = [
            f"<!doctype html><html lang=en><meta charset=utf-8><title>recsys</title><style>{_STYLE}</style>"
        ]
        options = "".join(f'<option value="{escape(name)}">' for name in list(self._rows)[:_LISTED])
        parts.append(
            f'<form>{escape(self._user)} <input name=user list=users value="{escape(user or "")}">'
            f"<datalist id=users>{options}</datalist> <button>Show</button></form>"
            f"<p>{len(self._rows):,} users are known here.</p>"
        )
        row = None if user is None else self.row(user)
        if user is not None and row is None:
            error = f"There is no row of user {user}."
        if error:
            parts.append(f"<p id=error>{escape(error)}</p>")
        if answer is not None and row is not None:
            (answered,) = answer["rows"]
            version = answer["model"] or answer["models"][0]
            parts.append(f"<h2>Recommendations</h2><p id=model>{escape(version)}</p>")
            parts.append(self._recommendations(answered))
            events = [[item, self._name(item)] for item in reversed(row.get(self._item) or [])]
            parts.append("<h2>History, newest first</h2>")
            parts.append(_table("history", ["item", "name"], events[:_HISTORY]))
        return "".join(parts)

    def _recommendations(self, answered: dict[str, Any]) -> str:
        """Returns a table of the items of an answer, the best by the first column of scores first."""
        lists = {name: values for name, values in answered.items() if isinstance(values, list)}
        item, *scores = lists
        order = sorted(range(len(lists[item])), key=lambda i: -lists[scores[0]][i])
        rows = [
            [lists[item][i], self._name(lists[item][i]), *(f"{lists[name][i]:.4g}" for name in scores)]
            for i in order
        ]
        return _table("items", ["item", "name", *scores], rows)

    def _name(self, item: Any) -> str:
        return self._names.get(str(item), "")


def _history_item(pipeline: pb.Pipeline) -> str:
    """Returns the column of a history's items: the first single-valued id feature of side HISTORY."""
    for column in features.columns(pipeline, pb.HISTORY):
        if column.feature.HasField("id") and not column.multi_valued:
            return column.name
    raise ConfigError("--page-rows: the package reads no ids of events")


def _read_rows(pipeline: pb.Pipeline, paths: Sequence[str], user: str) -> dict[str, dict[str, Any]]:
    source = open_source(given_source(paths, pipeline), pipeline)
    source.check(pipeline, "predict")
    rows: dict[str, dict[str, Any]] = {}
    wanted = [*(column.name for column in file_columns(pipeline, "predict")), *pipeline.data.key_columns]
    for group in source.row_groups:
        present = source.files[group.file].schema.names
        columns = [name for name in dict.fromkeys(wanted) if name in present]
        for row in source.read(group.file, group.number, columns).to_pylist():
            rows[str(row[user])] = row
            if len(rows) == MAX_USERS:
                return rows
    return rows


def _read_names(path: Path) -> dict[str, str]:
    try:
        table = pacsv.read_csv(path) if path.suffix == ".csv" else pq.read_table(path)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"--item-names {path}: cannot be read ({first_line(error)})") from error
    if not {"id", "name"} <= set(table.column_names):
        raise DataError(
            f"--item-names {path}: it needs the columns `id` and `name`, and has "
            f"{', '.join(table.column_names)}"
        )
    ids, names = (table[column].cast(pa.string()).to_pylist() for column in ("id", "name"))
    return {item: name or "" for item, name in zip(ids, names, strict=True)}


def _table(name: str, head: list[str], rows: list[list[Any]]) -> str:
    cells = "".join(f"<th>{escape(title)}</th>" for title in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table id={name}><tr>{cells}</tr>{body}</table>"
