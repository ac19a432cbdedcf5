"""`UserStore`: keeps encoded users between batches and requests.

Users lie on the model's device, less recently used ones on the host and then in files, each within a bound in
bytes. The store belongs to one set of weights: new weights need a new store.
"""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import torch

from recsys.scoring.cache import UserCache


@dataclass(frozen=True, eq=False)
class StoredUser:
    """A user as encoded at some time.

    Attributes:
        digest: hash of everything that the cache was computed from.
        num_events: number of events of the history.
        cache: the cache of this user alone.
    """

    digest: bytes
    num_events: int
    cache: UserCache

    def to(self, device: torch.device) -> "StoredUser":
        """Returns the user with the cache on a device; itself if it is there already."""
        if self.cache.device.type == device.type:
            return self
        return StoredUser(self.digest, self.num_events, self.cache.to(device))


class Tier(Protocol):
    """A part of a store, which keeps its most recently used users within a bound.

    Attributes:
        num_bytes: size of all users.
    """

    num_bytes: int

    def __len__(self) -> int: ...

    def add(self, key: Hashable, user: StoredUser) -> list[tuple[Hashable, StoredUser]]:
        """Adds a user who is not here; returns those who leave for the next tier."""
        ...

    def pop(self, key: Hashable) -> StoredUser | None:
        """Removes and returns a user; None if it is not here."""
        ...


class UserStore:
    """Keeps the most recently used users. Several threads may use it at once.

    The store does not judge whether an entry is still right: compare its digest.

    Args:
        device: the model's device, to which `get` returns users.
        host_bytes: bound on the memory on the host.
        device_bytes: bound on the memory on a GPU; ignored on a CPU.
        files: the last tier, usually `UserFiles`; None to drop the users who leave the host.
    """

    def __init__(
        self, device: torch.device, host_bytes: int, device_bytes: int = 0, files: Tier | None = None
    ):
        self._tiers: list[Tier] = [] if device.type == "cpu" else [_Memory(device, device_bytes)]
        self._tiers.append(_Memory(torch.device("cpu"), host_bytes))
        if files is not None:
            self._tiers.append(files)
        self._device, self._lock = device, threading.Lock()

    def get(self, key: Hashable) -> StoredUser | None:
        """Returns a user on the model's device, who is now the most recently used; None if there is none."""
        with self._lock:
            user = next((user for tier in self._tiers if (user := tier.pop(key)) is not None), None)
            if user is not None:
                user = user.to(self._device)
                self._add(key, user)
            return user

    def put(self, key: Hashable, user: StoredUser) -> None:
        """Adds or replaces a user. Those who no longer fit leave; one larger than all bounds is not kept."""
        with self._lock:
            for tier in self._tiers:
                tier.pop(key)
            self._add(key, user)

    @property
    def num_bytes(self) -> int:
        """The size of all caches in bytes."""
        with self._lock:
            return sum(tier.num_bytes for tier in self._tiers)

    def __len__(self) -> int:
        with self._lock:
            return sum(len(tier) for tier in self._tiers)

    def _add(self, key: Hashable, user: StoredUser) -> None:
        leaving = [(key, user)]
        for tier in self._tiers:
            leaving = [evicted for pair in leaving for evicted in tier.add(*pair)]


class _Memory:
    """Users on one device, least recently used first."""

    def __init__(self, device: torch.device, most_bytes: int):
        self.device, self.num_bytes, self._most_bytes = device, 0, most_bytes
        self._users: OrderedDict[Hashable, StoredUser] = OrderedDict()

    def __len__(self) -> int:
        return len(self._users)

    def add(self, key: Hashable, user: StoredUser) -> list[tuple[Hashable, StoredUser]]:
        """Adds a user who is not here; returns those who leave, or the user if it is larger than the tier."""
        size = user.cache.num_bytes
        if size > self._most_bytes:
            return [(key, user)]
        leaving = []
        while self.num_bytes + size > self._most_bytes:
            leaving.append(self._users.popitem(last=False))
            self.num_bytes -= leaving[-1][1].cache.num_bytes
        self._users[key] = user.to(self.device)
        self.num_bytes += size
        return leaving

    def pop(self, key: Hashable) -> StoredUser | None:
        """Removes and returns a user; None if it is not here."""
        user = self._users.pop(key, None)
        if user is not None:
            self.num_bytes -= user.cache.num_bytes
        return user
