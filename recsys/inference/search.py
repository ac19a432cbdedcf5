"""Finds the best items for queries, exactly or with a faiss index.

`predictor` opens a search over the item vectors of a package once and queries it batch by batch.
`predict.index` chooses the search.
"""

import logging
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from recsys import protos as pb
from recsys.config.registry import pick, register
from recsys.errors import ConfigError, InstallationError
from recsys.ops import TopK, top_k

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recall:
    """The share of the exact results that an index finds.

    Attributes:
        factory, search: settings of `pb.FaissIndex`.
        k: number of items to find per row.
        rows: number of rows that the index answered and that were also searched exactly.
        recall: share of the exactly found items that the index found; None if there are none.
    """

    factory: str
    search: str
    k: int
    rows: int
    recall: float | None


class Search(Protocol):
    """A search over the items of a package, as `open_search` returns it."""

    def best(self, queries: Tensor, k: int, *, removed: Tensor, removed_lengths: Tensor) -> TopK:
        """Finds the best `k` items like `ops.top_k`; all tensors are on the host."""
        ...

    def recall(self) -> Recall | None:
        """Returns the recall over the rows so far; None for an exact search."""
        ...


def open_search(settings: pb.Predict, items: Tensor, device: torch.device) -> Search:
    """Opens the search that a resolved config chooses.

    Args:
        items: float32 [V, E] on the host.
        device: device of an exact search.

    Raises:
        InstallationError: the index's library is not installed.
        ConfigError: the library cannot build the configured index.
    """
    if not settings.HasField("index"):
        return ExactSearch(items, device)
    index = pick(settings.index)
    return index.cls(index.config, items=items)


class ExactSearch:
    """Searches exactly among all items, which stay on the device."""

    def __init__(self, items: Tensor, device: torch.device):
        self._items = items.to(device)

    def best(self, queries: Tensor, k: int, *, removed: Tensor, removed_lengths: Tensor) -> TopK:
        """Implements `Search.best`."""
        queries = queries.to(self._items.device)
        best = top_k(queries, self._items, k, removed=removed, removed_lengths=removed_lengths)
        return TopK(best.scores.cpu(), best.items.cpu())

    def recall(self) -> None:
        """Implements `Search.recall`."""
        return None


class GivenScores:
    """Finds the best items by scores that a model has computed for all of them."""

    def best(self, queries: Tensor, k: int, *, removed: Tensor, removed_lengths: Tensor) -> TopK:
        """Implements `Search.best`; `queries` are the scores, float32 [B, V].

        Of items with equal scores, the one that comes first in the vocabulary is better.
        """
        rows, num_items = queries.shape
        # The last column takes items that are not in the catalogue.
        scores = torch.cat([queries, queries.new_zeros(rows, 1)], dim=1)
        row = torch.repeat_interleave(torch.arange(rows), removed_lengths)
        is_item = (removed >= 0) & (removed < num_items)
        scores[row, torch.where(is_item, removed, num_items)] = -torch.inf
        ranked = scores[:, :num_items].sort(dim=1, descending=True, stable=True)
        best, items = ranked.values[:, :k], ranked.indices[:, :k]
        return TopK(best, torch.where(best == -torch.inf, -1, items))

    def recall(self) -> None:
        """Implements `Search.recall`."""
        return None


@register(pb.FaissIndex)
class FaissIndex:
    """Builds a faiss index over all items and searches it.

    Args:
        config: the resolved message.
        items: float32 [V, E] on the host.

    Raises:
        InstallationError: faiss is not installed.
        ConfigError: faiss cannot build the index that `config` describes for these items.
    """

    def __init__(self, config: pb.FaissIndex, *, items: Tensor):
        self._config = config
        self._vectors = items.numpy()
        self._exact = ExactSearch(items, torch.device("cpu"))
        self._index = _build(_faiss(), config, self._vectors)
        self._k = self._rows = self._wanted = self._hits = 0

    def best(self, queries: Tensor, k: int, *, removed: Tensor, removed_lengths: Tensor) -> TopK:
        """Implements `Search.best`. Scores are exact; rows that the index cannot serve are searched
        exactly.
        """
        asked, gone = queries.numpy(), _Removed.of(removed, removed_lengths, len(self._vectors))
        answer = self._ordered(asked, self._look_up(asked, k, gone))
        available = np.minimum(k, len(self._vectors) - gone.counts)
        enough = (answer.items.numpy() >= 0).sum(axis=1) >= available
        # For a query of zeros all items have the same score, so the order of the catalogue decides.
        served = enough & asked.any(axis=1)
        measured = np.flatnonzero(served)[: max(self._config.recall_rows - self._rows, 0)]
        again = np.concatenate([np.flatnonzero(~served), measured])
        chosen, places = gone.select(again), torch.from_numpy(again)
        truth = self._exact.best(
            queries[places],
            k,
            removed=torch.from_numpy(chosen.items),
            removed_lengths=torch.from_numpy(chosen.counts),
        )
        self._compare(answer.items[places], truth.items, len(again) - len(measured))
        self._rows, self._k = self._rows + len(measured), k
        unserved = places[: len(again) - len(measured)]
        answer.items[unserved] = truth.items[: len(unserved)]
        answer.scores[unserved] = truth.scores[: len(unserved)]
        return answer

    def recall(self) -> Recall:
        """Implements `Search.recall`."""
        share = self._hits / self._wanted if self._wanted else None
        return Recall(self._config.factory, self._config.search, self._k, self._rows, share)

    def _look_up(self, queries: np.ndarray, k: int, gone: "_Removed") -> np.ndarray:
        """Returns the items that the index finds without removed ones, int64 [B, k], padded with -1."""
        numbers = np.full((len(queries), k), -1, np.int64)
        # Search rows with similar numbers of removed items together, so that few rows fetch too many.
        classes = np.ceil(np.log2(gone.counts + 1)).astype(np.int64)
        for size_class in np.unique(classes):
            rows = np.flatnonzero(classes == size_class)
            numbers[rows] = self._fetch(queries[rows], k, gone.select(rows))
        return numbers

    def _fetch(self, queries: np.ndarray, k: int, gone: "_Removed") -> np.ndarray:
        fetched = min(k + int(gone.counts.max()), len(self._vectors))
        numbers = np.full((len(queries), k), -1, np.int64)
        if not fetched:
            return numbers
        items = self._index.search(np.ascontiguousarray(queries), fetched)[1]
        struck = (items < 0) | gone.among(items)
        order = struck.argsort(axis=1, kind="stable")[:, :k]
        best = np.where(np.take_along_axis(struck, order, 1), -1, np.take_along_axis(items, order, 1))
        numbers[:, : best.shape[1]] = best
        return numbers

    def _ordered(self, queries: np.ndarray, items: np.ndarray) -> TopK:
        """Returns the found items with their exact scores, in the order of `top_k`."""
        scores = np.full(items.shape, -np.inf, np.float32)
        row, place = np.nonzero(items >= 0)
        scores[row, place] = np.einsum("ne,ne->n", queries[row], self._vectors[items[row, place]])
        order = np.lexsort((items, -scores), axis=1)
        return TopK(*(torch.from_numpy(np.take_along_axis(columns, order, 1)) for columns in (scores, items)))

    def _compare(self, answers: Tensor, truth: Tensor, first: int) -> None:
        """Counts how many of the exact results were found, for the rows from `first` on."""
        for ours, theirs in zip(answers[first:].numpy(), truth[first:].numpy(), strict=True):
            wanted = theirs[theirs >= 0]
            self._wanted += len(wanted)
            self._hits += int(np.isin(wanted, ours).sum())


@dataclass(frozen=True)
class _Removed:
    """The distinct items that each row must not find.

    Attributes:
        items: int64, the items of all rows, row after row.
        counts: int64 [B], number of items of each row.
        num_items: number of items in the catalogue.
    """

    items: np.ndarray
    counts: np.ndarray
    num_items: int

    @classmethod
    def of(cls, removed: Tensor, removed_lengths: Tensor, num_items: int) -> "_Removed":
        """Builds an instance from the arguments of `top_k`, without items that are not in the catalogue."""
        items, rows = removed.numpy(), _rows(removed_lengths.numpy())
        in_catalogue = (items >= 0) & (items < num_items)
        pairs = np.unique(np.stack([rows[in_catalogue], items[in_catalogue]]), axis=1)
        return cls(pairs[1], np.bincount(pairs[0], minlength=len(removed_lengths)), num_items)

    def select(self, rows: np.ndarray) -> "_Removed":
        """Selects the given rows, in the given order."""
        parts = np.split(self.items, np.cumsum(self.counts)[:-1]) if len(self.counts) else []
        chosen = [parts[row] for row in rows]
        items = np.concatenate(chosen) if chosen else self.items[:0]
        return _Removed(items, self.counts[rows], self.num_items)

    def among(self, items: np.ndarray) -> np.ndarray:
        """Returns bool [B, n]: whether each of the given items is removed for its row."""
        keys = _rows(self.counts) * self.num_items + self.items
        return np.isin(np.arange(len(items))[:, None] * self.num_items + items, keys)


def _rows(lengths: np.ndarray) -> np.ndarray:
    return np.repeat(np.arange(len(lengths)), lengths)


def _faiss() -> ModuleType:
    try:
        import faiss
    except ImportError as error:
        raise InstallationError(
            f"predict.index.faiss: faiss is not installed ({error}); type: python -m pip install faiss-cpu"
        ) from error
    return faiss


def _build(faiss: ModuleType, config: pb.FaissIndex, vectors: np.ndarray) -> Any:
    """Builds the index. On bad settings faiss raises a RuntimeError that begins with a source location."""
    log.info("building index %s of %d items", config.factory, len(vectors))
    try:
        index = faiss.index_factory(vectors.shape[1], config.factory, faiss.METRIC_INNER_PRODUCT)
        if config.search:
            faiss.ParameterSpace().set_index_parameters(index, config.search)
        index.train(vectors)
        index.add(vectors)
    except RuntimeError as error:
        said = str(error).strip().splitlines()[-1]
        settings = f"factory {config.factory!r}" + (f" and search {config.search!r}" if config.search else "")
        raise ConfigError(
            f"predict.index.faiss: faiss cannot build {settings} of {len(vectors)} items with "
            f"{vectors.shape[1]} numbers: {said}"
        ) from error
    return index
