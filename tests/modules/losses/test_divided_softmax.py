"""The loss over a catalogue that two ranks divide, against the loss of one process over all of it."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from recsys import protos as pb
from recsys.config.features import catalogue_rows
from recsys.modules.losses.divided_softmax import CataloguePart
from recsys.modules.losses.softmax import IGNORED, SoftmaxLoss
from tests.tools.forks import run_ranks

ITEMS, WIDTH = 11, 6
COUNTS = (5, 3)
"""Queries of each rank."""


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, items, targets and the weights of the losses of all ranks."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(sum(COUNTS), WIDTH, generator=generator, dtype=torch.float64)
    items = torch.randn(ITEMS, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.tensor([0, 10, 5, IGNORED, 6, 10, IGNORED, 3])
    weights = torch.rand(sum(COUNTS), generator=generator, dtype=torch.float64)
    return queries.to(dtype), items.to(dtype), targets, weights.to(dtype)


def softmax(dtype: torch.dtype) -> SoftmaxLoss:
    return SoftmaxLoss(pb.SoftmaxLoss(temperature=0.3, learn_temperature=True)).to(dtype)


def compare(rank: int, store: str, rank_of_empty: int) -> None:
    """One rank; `rank_of_empty` has no queries, unless it is -1."""
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        for l2_normalize in (False, True):
            whole = check(torch.float64, None, rank, rank_of_empty, l2_normalize)
            actual = check(dtype, rank, rank, rank_of_empty, l2_normalize)
            for name, expected in whole.items():
                difference = (actual[name].double() - expected).norm() / (expected.norm() + 1e-30)
                assert difference <= bound or not expected.numel(), (name, dtype, difference)
    dist.barrier()
    dist.destroy_process_group()


def check(
    dtype: torch.dtype, rank: int | None, shown: int, rank_of_empty: int, l2_normalize: bool
) -> dict[str, Tensor]:
    """Loss and gradients of rank `shown`: computed by one process if `rank` is None, else by two."""
    queries, items, targets, weights = inputs(dtype)
    first, last = (0, COUNTS[0]) if shown == 0 else (COUNTS[0], sum(COUNTS))
    if rank_of_empty == 0:
        queries, targets, weights = (x[COUNTS[0] :] for x in (queries, targets, weights))
        first, last = (0, 0) if shown == 0 else (0, COUNTS[1])
    rows = catalogue_rows(ITEMS + 1, shown, 2)
    local, places = slice(first, last), slice(rows.start - 1, rows.stop - 1)
    loss, part = softmax(dtype), None
    if rank is not None:
        queries, targets, weights, items = queries[local], targets[local], weights[local], items[places]
        part = CataloguePart(rows.start - 1, ITEMS, rank, 2)
    queries, items = queries.clone().requires_grad_(), items.clone().requires_grad_()
    losses = loss(queries, items, targets, l2_normalize=l2_normalize, part=part)
    (losses * weights).sum().backward()
    assert loss.log_excess is not None
    temperature = loss.log_excess.grad
    if rank is None:
        return {
            "losses": losses[local].detach(),
            "queries": queries.grad[local],
            "items": items.grad[places],
            "temperature": temperature,
        }
    # Training averages gradients of dense weights over ranks, for a loss that is multiplied by their number.
    dist.all_reduce(temperature)
    return {
        "losses": losses.detach(),
        "queries": queries.grad,
        "items": items.grad,
        "temperature": temperature,
    }


@pytest.mark.parametrize("rank_of_empty", [-1, 0])
def test_two_ranks_have_the_losses_and_gradients_of_one_process(tmp_path, rank_of_empty):
    run_ranks(compare, str(tmp_path / "store"), rank_of_empty)


def test_parts_of_the_catalogue_are_all_items_once():
    for ranks in (1, 2, 3, 5, 30):
        parts = [catalogue_rows(ITEMS + 1, rank, ranks) for rank in range(ranks)]
        assert [row for part in parts for row in part] == list(range(1, ITEMS + 1))
