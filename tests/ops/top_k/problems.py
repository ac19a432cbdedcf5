"""Problems for `top_k`, and the answer by sorting every score in plain Python."""

from typing import NamedTuple

import torch
from torch import Tensor

from recsys.ops import last_backend, top_k
from recsys.ops.top_k import TopK
from tests.ops.harness import Runner
from tests.tools.interpreter import between_poison


class Problem(NamedTuple):
    queries: Tensor
    items: Tensor
    removed: Tensor
    removed_lengths: Tensor

    def arguments(self, k: int) -> dict:
        return {**self._asdict(), "k": k}

    def placed(self, runner: Runner, dtype: torch.dtype | None = None) -> "Problem":
        """The problem on the runner's device, in the interpreter between rows of NaN; items in `dtype`."""
        vectors = [self.queries.to(runner.device), self.items.to(runner.device, dtype)]
        if runner.is_interpreted:
            vectors = [between_poison(rows) for rows in vectors]
        return Problem(*vectors, *self[2:])


def found_by(problem: Problem, k: int, runner: Runner) -> TopK:
    """The answer of the runner's backend; asserts that it ran."""
    answer = top_k(**problem.arguments(k), backend=runner.backend)
    assert last_backend("top_k") == runner.backend
    return answer


def whole_numbers(queries: int, items: int, width: int, seed: int, largest: int = 2) -> Problem:
    """Small whole numbers: products are exact in any type, and equal scores are common."""
    draw = torch.Generator().manual_seed(seed)
    vectors = (
        torch.randint(-largest, largest + 1, (n, width), generator=draw).float() for n in (queries, items)
    )
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


def brute_force(problem: Problem, k: int) -> tuple[list, list]:
    """Scores and items, in float64."""
    scores, items = [], []
    removed = problem.removed.split(problem.removed_lengths.tolist()) if len(problem.queries) else ()
    for query, history in zip(problem.queries.double(), removed, strict=True):
        products = (problem.items.double() * query).sum(1).tolist()
        gone = set(history.tolist())
        left = [(-score, index) for index, score in enumerate(products) if index not in gone]
        best = sorted(pair for pair in left if pair[0] < float("inf"))[:k]
        missing = k - len(best)
        scores.append([-score for score, _ in best] + [-float("inf")] * missing)
        items.append([index for _, index in best] + [-1] * missing)
    return scores, items


def exact_scores(problem: Problem) -> Tensor:
    """float64 [B, V], -inf for removed items."""
    scores = problem.queries.double() @ problem.items.double().T
    row = torch.repeat_interleave(problem.removed_lengths).to(scores.device)
    item = problem.removed.to(scores.device)
    is_known = (item >= 0) & (item < len(problem.items))
    scores[row[is_known], item[is_known]] = -torch.inf
    return scores


def assert_best(answer: TopK, problem: Problem, k: int) -> None:
    """Each score is that of its item, each place has the score that it must have, and no item is twice there.

    Scores may be off by 4e-6 of the largest product of lengths, which orders no items otherwise.
    """
    scores = exact_scores(problem)
    if scores.shape[1] < k:
        scores = torch.nn.functional.pad(scores, (0, k - scores.shape[1]), value=-torch.inf)
    best = scores.topk(k).values
    left = best > -torch.inf
    assert torch.equal(answer.items >= 0, left) and torch.equal(answer.scores > -torch.inf, left)
    lengths = (rows.double().norm(dim=1).amax() for rows in (problem.queries, problem.items))
    error = 4e-6 * torch.stack(list(lengths)).prod()
    for want in (best, scores.gather(1, answer.items.clamp(min=0))):
        assert ((answer.scores.double() - want)[left].abs() <= error).all()
    ordered = answer.items.sort(1).values
    assert not ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()
