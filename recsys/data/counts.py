"""Counts rows that were left out of batches or cut, from the readers to the log.

Reader processes import this module, so it imports neither torch nor TorchRec.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

TRUNCATED_HISTORY = "truncated_history"
TRUNCATED_CANDIDATES = "truncated_candidates"
REPEATED_TARGETS = "repeated_targets"

_NOT_LEFT_OUT = (TRUNCATED_HISTORY, TRUNCATED_CANDIDATES, REPEATED_TARGETS)

logger = logging.getLogger(__name__)


class Counts(NamedTuple):
    """Numbers of rows left out as bad (`data.bad_rows`), rows whose history or candidates were cut, and
    targets that evaluation removes because their user has had them."""

    left_out: int = 0
    cut_histories: int = 0
    cut_candidates: int = 0
    repeated_targets: int = 0

    @classmethod
    def of(cls, by_name: Mapping[str, int]) -> "Counts":
        """Sums up counts by reason; every reason that is not in `_NOT_LEFT_OUT` means a row left out."""
        special_counts = [by_name.get(name, 0) for name in _NOT_LEFT_OUT]
        return cls(sum(by_name.values()) - sum(special_counts), *special_counts)

    def plus(self, addend: "Counts") -> "Counts":
        """Adds two counts field by field."""
        return Counts(*(count + addend_count for count, addend_count in zip(self, addend, strict=True)))


class RowCounter:
    """Counts the rows of a split that one rank reads, and logs how many were left out or cut.

    Args:
        name: name of the split.
        of_rank: suffix that names the rank if there are several.
        by_epoch: True if the rows are read for training, one epoch after the other.

    Attributes:
        rows: rows that were read since `begin`, including those that were left out.
        by_name: rows left out by reason, and rows that were cut (TRUNCATED_HISTORY, TRUNCATED_CANDIDATES),
            and REPEATED_TARGETS.
    """

    def __init__(self, name: str, of_rank: str = "", *, by_epoch: bool) -> None:
        self.rows = 0
        self.by_name: Counter[str] = Counter()
        self._name, self._of_rank, self._by_epoch = name, of_rank, by_epoch
        self._logged: list[str] = []

    def begin(self) -> None:
        """Resets all counts to 0."""
        self.rows = 0
        self.by_name = Counter()

    def add(self, rows: int, by_name: Mapping[str, int]) -> None:
        """Adds the rows of a batch."""
        self.rows += rows
        self.by_name.update(by_name)

    @property
    def counts(self) -> Counts:
        """Returns the sums since `begin`."""
        return Counts.of(self.by_name)

    def log(self, epoch: int) -> None:
        """Warns about rows that were left out; logs cut rows again only when their numbers change."""
        where = f"{self._name} rows{f' of epoch {epoch}' if self._by_epoch else ''}{self._of_rank}"
        left_out, histories, candidates, repeated = self.counts
        if left_out:
            reasons = [
                (name, count) for name, count in self.by_name.most_common() if name not in _NOT_LEFT_OUT
            ]
            listed = ", ".join(f"{name} {count:,}" for name, count in reasons)
            logger.warning("%s: %s were left out (%s)", where, self._share(left_out), listed)
        if repeated:
            logger.info(
                "%s: %s targets are in the history of their row, so seen: REMOVE removes them",
                where,
                f"{repeated:,}",
            )
        parts = [
            f"{self._share(count)} had more {unit}, the {kept} were read"
            for count, unit, kept in (
                (histories, "events than data.max_history_len", "newest"),
                (candidates, "candidates than data.max_candidates", "first"),
            )
            if count
        ]
        if parts and parts != self._logged:
            # Cut candidates change the metric, which then covers only part of the candidates.
            level = logging.WARNING if candidates and not self._by_epoch else logging.INFO
            logger.log(level, "%s: %s", where, "; ".join(parts))
            self._logged = parts

    def _share(self, count: int) -> str:
        return f"{count:,} of {self.rows:,}"
