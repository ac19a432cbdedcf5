"""Keys of a run's process group that no earlier attempt has used.

`torchrun` keeps its store when it restarts processes, and PyTorch puts nothing before the keys of an attempt
(pytorch#135712): without this, new processes read the addresses of dead ones and wait for them.
"""

import time
import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from recsys.errors import RecsysError

_PAUSE = 0.01
"""Rank 0 polls the store at this interval, in seconds."""


def fresh_store(store: Store, rank: int, world_size: int, timeout: timedelta) -> PrefixStore:
    """Returns the store under a prefix that only the ranks of this attempt agree on. Collective.

    Each rank posts a random word, which nobody can have answered before; rank 0 answers with the common
    prefix. Words that a dead attempt left are answered too, and nobody reads those answers.

    Args:
        store: kept over attempts; its `get` waits.
        rank: this process. world_size: how many there are.
        timeout: how long rank 0 waits for the others.

    Raises:
        RecsysError: on rank 0, when a rank does not come.
    """
    word = uuid.uuid4().hex
    if rank > 0:
        store.set(f"hello/{rank}", word)
        word = store.get(f"answer/{word}").decode()
        store.add(f"{word}/arrived", 1)
        return PrefixStore(word, store)
    deadline = time.monotonic() + timeout.total_seconds()
    while (arrived := store.add(f"{word}/arrived", 0)) < world_size - 1:
        if time.monotonic() > deadline:
            raise RecsysError(
                f"{world_size - 1 - arrived} of {world_size} processes did not start in {timeout}"
            )
        for other in range(1, world_size):
            if store.check([f"hello/{other}"]):
                store.set(f"answer/{store.get(f'hello/{other}').decode()}", word)
        time.sleep(_PAUSE)
    return PrefixStore(word, store)
