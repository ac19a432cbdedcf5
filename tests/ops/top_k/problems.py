"""Problems for `top_k`, and the answer by sorting every score in plain Python."""

from typing import NamedTuple

import torch
from torch import Tensor


class Problem(NamedTuple):
    queries: Tensor
    items: Tensor
    removed: Tensor
    removed_lengths: Tensor

    def arguments(self, k: int) -> dict:
        return {**self._asdict(), "k": k}


def whole_numbers(queries: int, items: int, width: int, seed: int, most: int = 2) -> Problem:
    """Small whole numbers: products are exact in any type, and equal scores are common."""
    draw = torch.Generator().manual_seed(seed)
    vectors = (torch.randint(-most, most + 1, (n, width), generator=draw).float() for n in (queries, items))
    return Problem(*vectors, *history(queries, items, draw))


def around_centres(queries: int, items: int, width: int, seed: int, centres: int = 10) -> Problem:
    """float32 numbers; scores lie close together."""
    draw = torch.Generator().manual_seed(seed)
    middle = torch.randn(centres, width, generator=draw)

    def around(count):
        chosen = torch.randint(centres, (count,), generator=draw)
        return middle[chosen] + 0.1 * torch.randn(count, width, generator=draw)

    return Problem(around(queries), around(items), *history(queries, items, draw))


def history(queries: int, items: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Up to 6 items of each query, some twice, some unknown."""
    lengths = torch.randint(0, 7, (queries,), generator=draw)
    return torch.randint(-1, items + 2, (int(lengths.sum()),), generator=draw), lengths


def brute_force(given: Problem, k: int) -> tuple[list, list]:
    """Scores and items, in float64."""
    scores, found = [], []
    gone = given.removed.split(given.removed_lengths.tolist()) if len(given.queries) else ()
    for query, struck in zip(given.queries.double(), gone, strict=True):
        every = (given.items.double() * query).sum(1).tolist()
        struck = set(struck.tolist())
        left = [(-score, index) for index, score in enumerate(every) if index not in struck]
        best = sorted(one for one in left if one[0] < float("inf"))[:k]
        missing = k - len(best)
        scores.append([-score for score, _ in best] + [-float("inf")] * missing)
        found.append([index for _, index in best] + [-1] * missing)
    return scores, found
