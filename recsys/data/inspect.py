"""Shows one row of a batch as a table of tokens with original ids, for `--dry-run` and exploration."""

from datetime import datetime, timezone
from typing import NamedTuple

import numpy as np

from recsys import protos as pb
from recsys.config import checks, features
from recsys.config.declarations import model_of
from recsys.data.batch import Batch
from recsys.data.schema.contract import action_encoder
from recsys.data.schema.vocabulary import Buckets, HashBuckets, Vocabulary, mappings


class Token(NamedTuple):
    """One token of a sample; `position` is its index in the sequence, `-` for a candidate that is not
    a token."""

    position: str
    kind: str
    item: str
    action: str
    time: str


def describe_sample(batch: Batch, row: int, pipeline: pb.Pipeline) -> list[Token]:
    """Lists the tokens of row `row`, first to last: contextual, history, and candidates with their labels.

    Args:
        batch: a batch on the host.
        row: number of the row to describe.
        pipeline: resolved; its vocabularies turn table rows back into ids. A hashed id is shown as `#bucket`,
            an id that was not in the vocabulary as `unknown`.
    """
    names = _Names(batch, row, pipeline, mappings(pipeline))
    interleaved = checks.tokens_per_event(pipeline) == 2
    history = []
    for item, action, time in zip(
        names.of_items(pb.HISTORY),
        _actions(batch, row, pipeline),
        _times(batch, row, pb.HISTORY),
        strict=True,
    ):
        tokens = [(item, ""), ("", action)] if interleaved else [(item, action)]
        history += [("history", *token, time) for token in tokens]
    candidates = [
        ("candidate", item, label, time)
        for item, label, time in zip(
            names.of_items(pb.CANDIDATE), _labels(batch, row), _times(batch, row, pb.CANDIDATE), strict=True
        )
    ]
    contextual = [
        ("contextual", name, "", "") for name in _contextual(names.of_user(), batch.layout.num_contextual)
    ]
    in_sequence = [*contextual, *history, *(candidates if batch.layout.total_targets else [])]
    outside = [] if batch.layout.total_targets else candidates
    return [Token(str(i), *fields) for i, fields in enumerate(in_sequence)] + [
        Token("-", *fields) for fields in outside
    ]


def _contextual(features_of_row: list[str], num_tokens: int) -> list[str]:
    """Names the content of each contextual token: one feature, or all of them."""
    return (
        features_of_row if len(features_of_row) == num_tokens else ["; ".join(features_of_row)] * num_tokens
    )


def as_table(tokens: list[Token]) -> str:
    """Aligns tokens as text with a header line."""
    lines = [Token._fields, *tokens]
    widths = [max(len(line[i]) for line in lines) for i in range(len(Token._fields))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


class _Names:
    """Turns the table rows of one sample back into original ids."""

    def __init__(
        self,
        batch: Batch,
        row: int,
        pipeline: pb.Pipeline,
        table_mappings: dict[str, Vocabulary | HashBuckets | Buckets],
    ) -> None:
        self._batch = batch
        self._row = row
        self._columns = features.columns(pipeline)
        self._mappings = table_mappings
        self._item = _item_feature(pipeline)

    def of_items(self, side: int) -> list[str]:
        """Names the item of each event or candidate."""
        column = next((c for c in self._columns if c.side == side and c.feature.name == self._item), None)
        if column is None:
            return [""] * int(
                (self._batch.uih_lengths if side == pb.HISTORY else self._batch.num_candidates)[self._row]
            )
        return self._of(column)

    def of_user(self) -> list[str]:
        """Returns each USER feature as text, `name=value`."""
        texts = []
        for column in self._columns:
            if column.side == pb.USER:
                plain = column.table is None
                numbers = self._batch.numbers[column.name][self._row].reshape(-1).tolist() if plain else []
                value = " ".join([f"{number:.4g}" for number in numbers] if plain else self._of(column))
                texts.append(f"{column.name}={value}")
        return texts

    def _of(self, column: features.Column) -> list[str]:
        ids = self._batch.ids[column.name]
        start, stop = ids.offsets()[self._row : self._row + 2].tolist()
        rows = ids.values()[start:stop].numpy()
        mapping = self._mappings[column.table]
        if isinstance(mapping, Vocabulary):
            return [
                "unknown" if value is None else str(value) for value in mapping.original(rows).to_pylist()
            ]
        return [
            _between(mapping, bucket) if isinstance(mapping, Buckets) else f"#{bucket}"
            for bucket in rows.tolist()
        ]


def _item_feature(pipeline: pb.Pipeline) -> str:
    """Returns the name of the item feature: the one that the model searches, else the first single-valued id
    of both events and candidates, else an empty text."""
    searched = model_of(pipeline).item_feature
    if searched is not None:
        return searched
    both = {pb.HISTORY, pb.CANDIDATE}
    fits = (
        f.name
        for f in pipeline.features
        if f.HasField("id") and not f.id.multi_valued and both <= set(f.sides)
    )
    return next(fits, "")


def _between(buckets: Buckets, row: int) -> str:
    limits = [-np.inf, *buckets.boundaries, np.inf]
    return f"[{limits[row]:g}, {limits[row + 1]:g})"


def _part(batch: Batch, row: int, side: int) -> slice:
    lengths = batch.uih_lengths if side == pb.HISTORY else batch.num_candidates
    start = int(lengths[:row].sum())
    return slice(start, start + int(lengths[row]))


def _times(batch: Batch, row: int, side: int) -> list[str]:
    times = batch.uih_timestamps if side == pb.HISTORY else batch.candidate_timestamps
    seconds = times[_part(batch, row, side)].tolist()
    return [datetime.fromtimestamp(time, timezone.utc).strftime("%Y-%m-%d %H:%M:%S") for time in seconds]


def _actions(batch: Batch, row: int, pipeline: pb.Pipeline) -> list[str]:
    encoder, part = action_encoder(pipeline), _part(batch, row, pb.HISTORY)
    texts = []
    for mask, seconds in zip(
        batch.uih_actions[part].tolist(), batch.uih_watch_time[part].tolist(), strict=True
    ):
        names = [bit.name for bit in encoder.bits if mask >> bit.bit & 1]
        if encoder.watch_time_thresholds:
            names.append(f"{seconds:g}s")
        texts.append(" ".join(names))
    return texts


def _labels(batch: Batch, row: int) -> list[str]:
    part = _part(batch, row, pb.CANDIDATE)
    columns = [
        [f"{name}={value:g}" for value in labels[part].tolist()] for name, labels in batch.labels.items()
    ]
    return (
        [" ".join(labels) for labels in zip(*columns, strict=True)]
        if columns
        else [""] * (part.stop - part.start)
    )
