"""Attempts that share a store agree on different prefixes, whatever earlier attempts left there."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from recsys.errors import RecsysError
from recsys.training.rendezvous import fresh_store

SECONDS = timedelta(seconds=20)


def attempt(store: dist.Store, order: list[int]) -> list[dist.PrefixStore]:
    """The stores of all ranks, which start in this order."""
    with ThreadPoolExecutor(len(order)) as pool:
        futures = {rank: pool.submit(fresh_store, store, rank, len(order), SECONDS) for rank in order}
        return [futures[rank].result() for rank in sorted(order)]


@pytest.fixture
def store() -> dist.Store:
    chosen = dist.HashStore()
    chosen.set_timeout(SECONDS)
    return chosen


def test_the_ranks_of_an_attempt_meet_and_those_of_another_do_not(store):
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        stores = attempt(store, order)
        assert not any(item.check(["address"]) for item in stores)
        stores[1].set("address", str(order))
        assert [item.get("address").decode() for item in stores] == [str(order)] * 3


def test_a_rank_that_died_at_any_point_misleads_nobody(store):
    store.set("hello/1", "of a rank that died before it was answered")
    store.set("hello/2", "of one that died behind the answer")
    store.set("answer/of one that died behind the answer", "an old word")
    stores = attempt(store, [0, 1, 2])
    stores[2].set("address", "new")
    assert [item.get("address") for item in stores] == [b"new"] * 3
    assert not store.check(["address"]) and not dist.PrefixStore("an old word", store).check(["address"])


def test_one_process_waits_for_nobody(store):
    fresh_store(store, 0, 1, SECONDS).set("address", "mine")
    assert not store.check(["address"])


def test_a_rank_that_does_not_come_is_an_error(store):
    with pytest.raises(RecsysError, match=r"^1 of 2 processes did not start in 0:00:00\.1"):
        fresh_store(store, 0, 2, timedelta(seconds=0.1))
