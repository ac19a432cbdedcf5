"""`UserStore` against its contract, and joined caches against those of whole batches."""

import random
from types import SimpleNamespace

import pytest
import torch

from recsys.scoring.cache import UserCache
from recsys.scoring.prefill import CachedModel
from recsys.scoring.user_store import StoredUser, UserStore
from tests.modules.pipelines import RANKERS, batch_of, pipeline_of, random_rows
from tests.scoring.test_prefill import FORMS, SIZES, build, close


def user(number: int, size: int, device: str = "cuda") -> StoredUser:
    """A user whose cache has a device and a size, and moves, without a GPU."""
    cache = SimpleNamespace(device=torch.device(device), num_bytes=size)
    cache.to = lambda where: user(number, size, torch.device(where).type).cache
    return StoredUser(b"", number, cache)


class Lists:
    """The contract, word for word, on lists of (key, number, size), most recently used first."""

    def __init__(self, *bounds: int):
        self.lists = [([], bound) for bound in bounds]

    def put(self, key: int, number: int, size: int) -> None:
        for users, _ in self.lists:
            users[:] = [user for user in users if user[0] != key]
        leaving = [(key, number, size)]
        for users, bound in self.lists:
            arriving, leaving = leaving, []
            for user in arriving:
                if user[2] > bound:
                    leaving.append(user)
                    continue
                users.insert(0, user)
                while sum(size for _, _, size in users) > bound:
                    leaving.append(users.pop())

    def get(self, key: int) -> int | None:
        for users, _ in self.lists:
            for user in users:
                if user[0] == key:
                    self.put(*user)
                    return user[1]
        return None


@pytest.mark.parametrize(("device", "bounds"), [("cpu", [50]), ("cuda", [30, 50])])
def test_the_least_recently_used_users_leave(device, bounds):
    draw, store, lists = random.Random(1), UserStore(torch.device(device), 50, 30), Lists(*bounds)
    hits = 0
    for number in range(3000):
        key = draw.randrange(12)
        if draw.random() < 0.5:
            size = draw.choice([1, 5, 9, 13, 40, 60])
            store.put(key, user(number, size, device))
            lists.put(key, number, size)
        else:
            got, expected = store.get(key), lists.get(key)
            assert (got and got.num_events) == expected
            assert got is None or got.cache.device.type == device
            hits += got is not None
        assert len(store) == sum(len(users) for users, _ in lists.lists)
        assert store.num_bytes == sum(size for users, _ in lists.lists for _, _, size in users)
    assert 100 < hits < 1400


@pytest.mark.parametrize("form", ["truncated", "hybrid", "channels", "all"])
@torch.no_grad()
def test_caches_of_single_users_join_to_that_of_all(form):
    pipeline = pipeline_of(*(FORMS | RANKERS)[form])
    model, rows = build(pipeline), random_rows(pipeline, SIZES)
    batch = batch_of(pipeline, rows)
    alone = [CachedModel(model).prefill(batch_of(pipeline, [row])) for row in rows]
    close(CachedModel(model).score(batch, UserCache.join(alone)), model.score(batch))
