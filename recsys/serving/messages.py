"""Messages between the server, which does without PyTorch, and a process that scores."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from recsys import protos as pb

Columns = dict[str, list[list[Any]]]
"""Columns of an answer, each with a list per row."""


class Order(NamedTuple):
    """Tells a process that scores what to load.

    Attributes:
        folder: folder of the package.
        verify_key: file of the public key that must have signed the package; None for any package.
        store: fields that replace those of the package's store of users; None for what the package says.
        imports: modules that extend the config language.
        log_level: level of the log of this package.
    """

    folder: Path
    verify_key: Path | None = None
    store: pb.UserStore | None = None
    imports: tuple[str, ...] = ()
    log_level: str = "INFO"


class Loaded(NamedTuple):
    """Facts about a loaded package.

    Attributes:
        pipeline: its config.
        version: step, and the beginning of the hash of the package's manifest.
        outputs: its tasks.
        searched: the feature whose items it recommends; None if it scores candidates.
        max_items: the most items that it recommends for a row; None if it scores candidates.
        keeps_users: whether it has a store of users.
    """

    pipeline: pb.Pipeline
    version: str
    outputs: list[str]
    searched: str | None
    max_items: int | None
    keeps_users: bool


class RowBatch(NamedTuple):
    """Rows of any requests.

    Attributes:
        columns: the columns that the package reads, each with a value per row.
        k: the number of items to recommend for each row; 0 for a model that scores candidates.
        users: by what a store of users knows each row; None without such a store.
        streams: the same columns of further rows, as Arrow IPC streams.
    """

    columns: dict[str, list[Any]]
    k: int
    users: list[str | None] | None
    streams: Sequence[bytes] = ()


class Scored(NamedTuple):
    """The answer to a `RowBatch`.

    Attributes:
        columns: scores, or items and their scores.
        bad_rows: a sentence for each bad row, by its index. The answer's columns hold nothing useful for it.
        seconds: the time of each stage.
        ways: the number of rows by how the store of users served them.
    """

    columns: Columns
    bad_rows: dict[int, str]
    seconds: dict[str, float]
    ways: dict[str, int]
