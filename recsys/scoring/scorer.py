"""`Scorer`: scores batches for all callers, and chooses between one pass and a cache.

In one pass, users, histories and all candidates of the rows go through the model together. With a cache, each
history runs once, and candidates are scored in pieces against its keys and values.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

import torch

from recsys import protos as pb
from recsys.data.batch import Batch
from recsys.models.base import Model
from recsys.scoring.cache import UserCache
from recsys.scoring.pieces import cut, packed, piece_size
from recsys.scoring.prefill import CachedModel, keeps_cache
from recsys.scoring.user_candidate_split import UserCandidateSplit

ONE_PASS = 100
"""Up to this many candidates per row, a CPU takes one pass even if it could use a cache.

The time of one pass grows with the square of this number; experiments/2026-11-23-fewer-forms/ways.md has the
times.
"""

CACHED_PIECE = 1024
"""Default number of candidates that are scored together against caches, padding included."""

Scores = TypeVar("Scores")


class Way(Enum):
    """The ways to score a batch."""

    ONE_PASS = "one pass"
    CACHE = "cache"


class Program(Protocol[Scores]):
    """Computes scores: a model in eager mode, or the compiled programs of a package."""

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        ...

    @property
    def keeps_cache(self) -> bool:
        """Whether `prefill` and `score` can be called."""
        ...

    def run(self, batch: Batch) -> Scores:
        """Scores a batch in one pass."""
        ...

    def prefill(self, batch: Batch) -> UserCache:
        """Encodes the users and histories of a batch without candidates."""
        ...

    def score(self, batch: Batch, cache: UserCache) -> Scores:
        """Scores candidates of the users of the cache; the batch has nothing but candidates."""
        ...

    def join(self, parts: Sequence[Scores]) -> Scores:
        """Joins the scores of consecutive candidates; there is at least one part."""
        ...


class Scorer(Generic[Scores]):
    """Scores batches with a program, each in the faster way.

    A GPU always takes one pass, which is as fast as a cache if all candidates are known at once
    (experiments/2026-11-23-fewer-forms/graphs.md). A CPU takes a cache for rows with many candidates.

    Args:
        program: the model or the package.
        pipeline: the resolved config of `program`.
        cached_piece: number of candidates that are scored together against caches, padding included; rounded
            up to whole target groups.
    """

    def __init__(self, program: Program[Scores], pipeline: pb.Pipeline, cached_piece: int = CACHED_PIECE):
        self.program = program
        self.cached_piece = piece_size(pipeline, cached_piece)
        self._split = UserCandidateSplit(pipeline)

    @property
    def may_cache(self) -> bool:
        """Whether some batches are scored with a cache."""
        return self.program.keeps_cache and self.program.device.type == "cpu"

    def way(self, batch: Batch) -> Way:
        """Chooses how to score a batch, by its longest list of candidates."""
        if not self.may_cache or not len(batch.num_candidates):
            return Way.ONE_PASS
        return Way.CACHE if int(batch.num_candidates.max()) > ONE_PASS else Way.ONE_PASS

    def score(self, batch: Batch) -> Scores:
        """Scores all candidates of a batch, in its order. Call it under `torch.no_grad()`."""
        if self.way(batch) is Way.ONE_PASS:
            return self.program.run(batch)
        return self.score_cached(batch, self.program.prefill(self._split.users(batch)))

    def score_cached(self, batch: Batch, cache: UserCache) -> Scores:
        """Scores all candidates of a batch against a cache of its rows, in pieces.

        Args:
            batch: a batch on the host; row b has the candidates of user b of the cache.
        """
        pieces = cut(batch.num_candidates.tolist(), self.cached_piece)
        parts, start, all_rows = [], 0, list(range(cache.batch_size))
        runs = list(packed(pieces, self.cached_piece))
        if not runs or (len(runs) == 1 and [piece.row for piece in pieces] == all_rows):
            return self.program.score(self._split.candidates(batch), cache)
        for run in runs:
            rows, counts = [piece.row for piece in run], [piece.count for piece in run]
            candidates = self._split.candidate_range(batch, start, counts)
            users = cache if rows == all_rows else cache.select(rows)
            parts.append(self.program.score(candidates, users))
            start += sum(counts)
        return self.program.join(parts)


class EagerModel:
    """A model in evaluation mode as a `Program`. Its scores are the outputs that objective and metrics take.

    Args:
        model: the model as built, or with its tables sharded in place.
        may_cache: whether a cache may be used. It must be False if each batch has to be a single call of the
            model: ranks that look up sharded tables together must make the same number of calls, and
            diagnostics watch whole rows.
    """

    def __init__(self, model: Model, *, may_cache: bool = True):
        self.model = model
        self._cached = CachedModel(model) if may_cache and keeps_cache(model) else None
        self._first: Any = None

    @property
    def device(self) -> torch.device:
        """The device of the model's parameters."""
        return next(self.model.parameters()).device

    @property
    def keeps_cache(self) -> bool:
        """Whether histories can be encoded separately from candidates."""
        return self._cached is not None

    def run(self, batch: Batch) -> Any:
        """Returns the model's outputs. Results that all batches share, such as encoded items, are reused."""
        if self._first is None:
            self._first = self.model(batch)
            return self._first
        return self.model.forward_again(batch, self._first)

    def prefill(self, batch: Batch) -> UserCache:
        """Encodes users and histories."""
        return self._with_cache().prefill(batch)

    def score(self, batch: Batch, cache: UserCache) -> Any:
        """Returns the model's outputs for candidates of the users of a cache."""
        return self._with_cache().outputs(batch, cache)

    def join(self, parts: Sequence[Any]) -> Any:
        """Joins the outputs of consecutive candidates."""
        return type(parts[0]).joined(parts)

    def _with_cache(self) -> CachedModel:
        if self._cached is None:
            raise ValueError(f"{type(self.model).__name__} scores without a cache here")
        return self._cached
