"""Gives each attempt of a run separate keys in the store through which its processes meet.

`torchrun` keeps the store when it restarts processes, and PyTorch uses the same keys in all attempts
(pytorch#135712). With shared keys, new processes would read the addresses of dead processes and wait for
them.
"""

import time
import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from recsys.errors import RecsysError

_PAUSE = 0.01
"""Rank 0 polls the store at this interval, in seconds."""


def fresh_store(store: Store, rank: int, world_size: int, timeout: timedelta) -> PrefixStore:
    """Returns the store under a prefix that only the ranks of this attempt share. Collective.

    Each rank posts a new random word, and rank 0 answers each word with the common prefix. Rank 0 also
    answers words left by a dead attempt, but no process reads those answers.

    Args:
        store: the store, which outlives attempts; its `get` blocks until the key is set.
        rank: the number of this process.
        world_size: the number of processes.
        timeout: how long rank 0 waits for the other ranks.

    Raises:
        RecsysError: on rank 0, if a rank does not start in time.
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
        for peer in range(1, world_size):
            if store.check([f"hello/{peer}"]):
                store.set(f"answer/{store.get(f'hello/{peer}').decode()}", word)
        time.sleep(_PAUSE)
    return PrefixStore(word, store)
