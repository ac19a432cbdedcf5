"""Writes and reads `metrics.jsonl`, the file of a run that other programs read.

Each line is a JSON object whose `kind` is "train", "evaluation" or "diagnostics". Numbers have all their
digits, so two runs can be compared bit for bit; undefined numbers are null. Entries that depend on the clock
or the machine are rounded: `*_per_s`, `mfu`, `data_wait`, `memory_bytes`, `seconds`. `left_out` counts bad
rows, `cut_histories` and `cut_candidates` count rows that were read in part.

A line of kind "diagnostics" adds details about the evaluation of `step`. The file ends with such a line for
the last evaluation and one for the best. `slices` groups the validation rows by number of history events
(`history`: least and most), with the number of `rows`, of their `candidates`, and `metrics` over them. For
each task with a binary loss, `calibration` has up to ten bins of about equal weight by rising prediction:
`candidates`, mean prediction (`predicted`), share of positives (`observed`).
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypedDict

from recsys import files, typed_json
from recsys.errors import RecsysError, shortened
from recsys.training.hooks.base import Diagnosed, Evaluated, Hook, Run, Trained

NAME = "metrics.jsonl"


class MetricsFile(Hook):
    """Appends one line per record. A run that continues first drops the steps that it will repeat."""

    def __init__(self) -> None:
        self._file: TextIO | None = None

    def started(self, run: Run) -> None:
        """Opens the file, without the lines of steps that will be repeated."""
        path = run.folder / NAME
        if path.exists():
            records = [record for record in read_metrics(path) if record["step"] <= run.first_step]
            files.write_text(path, "".join(_line(record) for record in records))
        self._file = path.open("a", encoding="utf-8")

    def trained(self, record: Trained) -> None:
        """Writes a line of kind "train"."""
        rates = record.rates
        self._write(
            {
                "kind": "train",
                "step": record.step,
                "epoch": record.epoch,
                "loss": record.loss,
                "losses": record.losses,
                "lr": record.lr,
                "grad_norm": record.grad_norm,
                "samples_per_s": round(rates.samples_per_s, 1),
                "tokens_per_s": round(rates.tokens_per_s, 1),
                "tflop_per_s": float(f"{rates.flop_per_s / 1e12:.4g}"),
                "mfu": None if rates.mfu is None else round(rates.mfu, 4),
                "data_wait": round(rates.data_wait, 4),
                "memory_bytes": record.memory,
                **record.counts._asdict(),
            }
        )

    def evaluated(self, record: Evaluated) -> None:
        """Writes a line of kind "evaluation"."""
        self._write(
            {
                "kind": "evaluation",
                "step": record.step,
                "metrics": record.metrics,
                "best": record.best,
                "seconds": round(record.seconds, 2),
                **record.counts._asdict(),
            }
        )

    def diagnosed(self, record: Diagnosed) -> None:
        """Writes a line of kind "diagnostics"."""
        self._write({"kind": "diagnostics", "step": record.step, **record.results.to_json()})

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            raise ValueError("MetricsFile.started has not been called")
        self._file.write(_line(record))
        self._file.flush()


class _NeededOfTrain(TypedDict):
    step: int
    loss: float | None
    losses: dict[str, float | None]
    samples_per_s: float
    data_wait: float


class _TrainRecord(_NeededOfTrain, total=False):
    lr: dict[str, float | None]
    grad_norm: float | None
    tokens_per_s: float | None
    tflop_per_s: float | None
    mfu: float | None
    memory_bytes: int | None


class _EvaluationRecord(TypedDict):
    step: int
    metrics: dict[str, float | None]
    best: bool


class _Lengths(NamedTuple):
    shortest: int
    longest: int


class _Slice(TypedDict):
    history: _Lengths
    rows: int
    candidates: int
    metrics: dict[str, float | None]


class _Bin(TypedDict):
    candidates: float
    predicted: float | None
    observed: float | None


class _DiagnosticsRecord(TypedDict):
    step: int
    slices: list[_Slice]
    calibration: dict[str, list[_Bin]]


class _AnyRecord(TypedDict):
    kind: str


_RECORDS = {"train": _TrainRecord, "evaluation": _EvaluationRecord, "diagnostics": _DiagnosticsRecord}
"""For each kind of line, the entries that `read_metrics` checks. Lines may have further entries."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads the records of a `metrics.jsonl`. A last line that was cut off is left out.

    Raises:
        RecsysError: another line is damaged.
    """
    records = []
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            kind = typed_json.parse(line, _AnyRecord)["kind"]
            if kind not in _RECORDS:
                raise TypeError(f"kind is {shortened(kind)}, expected one of {', '.join(_RECORDS)}")
            typed_json.parse(line, _RECORDS[kind])
            records.append(json.loads(line))
        except (ValueError, TypeError) as error:
            if number == len(lines) and isinstance(error, ValueError):
                break
            raise RecsysError(
                f"{path}, line {number}: damaged ({error}); remove the line, or the file, and start again"
            ) from error
    return records


def _line(record: dict[str, Any]) -> str:
    return json.dumps(_finite(record), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(x) for key, x in value.items()}
    if isinstance(value, list):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
