"""Scores rows whose users' caches are kept between batches and requests, where this is faster."""

import hashlib
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from recsys import protos as pb
from recsys.data.batch import Batch
from recsys.data.convert.column_block import ColumnBlock
from recsys.errors import ConfigError
from recsys.files import MANIFEST
from recsys.inference.eager import EagerPackage
from recsys.inference.fingerprints import Fingerprints, later_events
from recsys.inference.shared_rows import PackageProgram, without
from recsys.modules.cache import NotExtendableError
from recsys.scoring.cache import UserCache
from recsys.scoring.scorer import Scorer
from recsys.scoring.user_files import UserFiles
from recsys.scoring.user_store import StoredUser, UserStore

REUSED, EXTENDED, ENCODED, WITHOUT = "reused", "extended", "encoded", "without"
"""Ways to score a row: with a stored entry, an extended one or a new one, or without the store."""

_TIMES = 4
"""Runs of each way when two are compared; the fastest counts. The first may record a CUDA graph."""

_MIB = 1 << 20

log = logging.getLogger(__name__)


class _Size(NamedTuple):
    """Size of a batch, in powers of two: what a decision holds for."""

    rows: int
    events: int
    candidates: int

    @classmethod
    def of(cls, block: ColumnBlock) -> "_Size":
        lengths = block.lengths
        counts = len(block.row), int(lengths[pb.HISTORY].sum()), int(lengths[pb.CANDIDATE].sum())
        return cls(*(count.bit_length() for count in counts))

    def __str__(self) -> str:
        words = ("rows", "events", "candidates")
        return ", ".join(f"{(1 << bits) - 1} {word}" for bits, word in zip(self, words, strict=True))


class StoredScores:
    """Scores batches of rows with a store of their users.

    An entry is used if its hash equals that of the row's user and whole history. It is extended if it has the
    hash of the row with its oldest events only, and the program can extend it exactly. Otherwise the history
    is encoded and replaces it. The key of an entry is the first key column; rows without keys share entries
    if they are equal.

    Args:
        scorer: the program, and the way to score without the store.
        to_batch: makes a batch from rows.
        pipeline: the resolved config of the program.
        store: the users.
        observe: called with the way and the number of rows that were scored in it.

    Attributes:
        rows: number of rows by way.
        is_faster: by size of a batch, whether the store was faster when it was measured.
    """

    def __init__(
        self,
        scorer: Scorer[Tensor],
        to_batch: Callable[[ColumnBlock], Batch],
        pipeline: pb.Pipeline,
        store: UserStore,
        observe: Callable[[str, int], None] = lambda way, rows: None,
    ):
        self.scorer, self.to_batch, self.pipeline, self.store = scorer, to_batch, pipeline, store
        self.rows: Counter[str] = Counter()
        self.is_faster: dict[_Size, bool] = {}
        self._observe, self._lock = observe, threading.Lock()
        self._extends = scorer.program.extends

    def score(self, block: ColumnBlock) -> Tensor:
        """Returns the scores of all candidates of a block of good rows, on the program's device."""
        size = _Size.of(block)
        is_faster = self.is_faster.get(size)
        if is_faster is False:
            self._count({WITHOUT: len(block.row)})
            return self._without(block)
        users = self._users(block)
        self._count(users.ways)
        scores = self._with(block, users.cache)
        if is_faster is None:
            self._measure(size, block)
        return scores

    def summary(self) -> str:
        """Returns a sentence about the rows so far."""
        rows = ", ".join(f"{self.rows[way]} {way}" for way in (REUSED, EXTENDED, ENCODED, WITHOUT))
        return f"user store: rows {rows}; {len(self.store)} users in {self.store.num_bytes / _MIB:.1f} MiB"

    def _users(self, block: ColumnBlock) -> "_Users":
        """Returns the caches of the rows' users, joined, and the way in which each row got its cache."""
        prints, users = Fingerprints(block, self.pipeline), {}
        digests = [prints.digest(row, count) for row, count in enumerate(prints.num_events)]
        keys = _keys(block, digests)
        grown, encoded = [], []
        for row, key in enumerate(keys):
            user, count = self.store.get(key), prints.num_events[row]
            if user is not None and (user.num_events, user.digest) == (count, digests[row]):
                users[row] = user
            elif (
                user is not None
                and self._extends
                and user.num_events < count
                and prints.digest(row, user.num_events) == user.digest
            ):
                users[row] = user
                grown.append(row)
            else:
                encoded.append(row)
        extended = self._extended(block, grown, [users[row] for row in grown])
        if extended is None:
            grown, encoded = [], [*encoded, *grown]
        ways = Counter({REUSED: len(keys) - len(grown) - len(encoded), EXTENDED: len(grown)})
        ways[ENCODED] = len(encoded)
        for rows, cache in ((grown, extended), (encoded, self._encoded(block, encoded))):
            for place, row in enumerate(rows):
                alone = cache if len(rows) == 1 else cache.select([place])
                users[row] = StoredUser(digests[row], prints.num_events[row], alone)
                self.store.put(keys[row], users[row])
        return _Users(UserCache.join([users[row].cache for row in range(len(keys))]), ways)

    def _extended(
        self, block: ColumnBlock, rows: Sequence[int], users: Sequence[StoredUser]
    ) -> UserCache | None:
        """Appends the rows' later events to their users' caches; None if old keys and values would change."""
        if not rows:
            return None
        skipped = np.array([user.num_events for user in users])
        events = self.to_batch(later_events(block.select(np.array(rows)), skipped))
        try:
            return self.scorer.program.extend(events, UserCache.join([user.cache for user in users]))
        except NotExtendableError as error:
            log.debug("histories that grow are encoded again: %s", error)
            return None

    def _encoded(self, block: ColumnBlock, rows: Sequence[int]) -> UserCache | None:
        if not rows:
            return None
        return self.scorer.program.prefill(self.to_batch(without(block.select(np.array(rows)), pb.CANDIDATE)))

    def _with(self, block: ColumnBlock, cache: UserCache) -> Tensor:
        return self.scorer.score_cached(self.to_batch(without(block, pb.HISTORY)), cache)

    def _without(self, block: ColumnBlock) -> Tensor:
        return self.scorer.score(self.to_batch(block))

    def _measure(self, size: _Size, block: ColumnBlock) -> None:
        """Compares both ways on rows whose users are in the store now, and remembers the faster one."""
        seconds: dict[bool, float] = {}
        for _ in range(_TIMES):
            for stored in (True, False):
                start = time.perf_counter()
                scores = self._with(block, self._users(block).cache) if stored else self._without(block)
                scores.cpu()  # waits for a GPU
                seconds[stored] = min(seconds.get(stored, np.inf), time.perf_counter() - start)
        self.is_faster[size] = seconds[True] < seconds[False]
        log.info(
            "batches of up to %s: %.2f ms with users in the store, %.2f ms without; the store is %s",
            size,
            1000 * seconds[True],
            1000 * seconds[False],
            "used" if self.is_faster[size] else "left out",
        )

    def _count(self, ways: dict[str, int]) -> None:
        with self._lock:
            self.rows.update(ways)
        for way, rows in ways.items():
            self._observe(way, rows)


class _Users(NamedTuple):
    """The joined caches of a batch, and the number of rows by the way in which they got theirs."""

    cache: UserCache
    ways: Counter[str]


def open_store(
    scorer: Scorer[Tensor],
    to_batch: Callable[[ColumnBlock], Batch],
    pipeline: pb.Pipeline,
    observe: Callable[[str, int], None] = lambda way, rows: None,
) -> StoredScores | None:
    """Returns scores with the store of `predict.user_store`; None if the config has none.

    Raises:
        ConfigError: the package was exported without the programs that score with a cache; or the store has a
            folder that cannot be used, or that a model in memory cannot use.
    """
    if not pipeline.predict.HasField("user_store"):
        return None
    if not scorer.program.keeps_cache:
        raise ConfigError(
            "predict.user_store: the package has no programs that score with a cache; export it with "
            "export.cached_scoring: true, or remove this setting"
        )
    memory = pipeline.predict.user_store
    disk = _user_files(scorer.program, pipeline) if memory.HasField("disk") else None
    store = UserStore(scorer.program.device, memory.host_mib * _MIB, memory.device_mib * _MIB, disk)
    return StoredScores(scorer, to_batch, pipeline, store, observe)


def _user_files(program: PackageProgram | EagerPackage, pipeline: pb.Pipeline) -> UserFiles:
    """Opens the files of users of the program's weights."""
    settings = pipeline.predict.user_store.disk
    if program.folder is None:
        raise ConfigError(
            "predict.user_store.disk: nothing identifies the weights of a model in memory; load a package "
            "or a checkpoint, or remove this setting"
        )
    version = hashlib.blake2b((program.folder / MANIFEST).read_bytes())
    for part in (pipeline.features, (pipeline.model,)):
        for message in part:
            version.update(message.SerializeToString(deterministic=True))
    version.update(json.dumps(program.cache_spec.to_json()).encode())
    try:
        return UserFiles(Path(settings.folder), settings.mib * _MIB, version.digest(), program.cache_spec)
    except OSError as error:
        raise ConfigError(f"predict.user_store.disk.folder: {error}; name another folder") from error


def _keys(block: ColumnBlock, digests: Sequence[bytes]) -> list[Hashable]:
    """Returns the key of each row's entry: its first key column, or its hash if it has no key."""
    if block.keys is None or not block.keys.num_columns:
        return list(digests)
    given = block.keys.column(0).to_pylist()
    return [digest if key is None else key for key, digest in zip(given, digests, strict=True)]
