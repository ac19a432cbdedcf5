"""`linear_logp_sharded` on two ranks against `linear_logp` over the whole weight."""

import pytest
import torch
import torch.distributed as dist

from recsys.ops import linear_logp
from recsys.ops.linear_logp.parallel import linear_logp_sharded
from tests.ops.harness import gradients
from tests.ops.linear_logp.problems import arguments_of, leaves_of, problem
from tests.tools.forks import run_ranks

CANDIDATES = 24


def compare(rank: int, cuts: tuple[int, int, int], ids: bool) -> None:
    """Outputs, all gradients at once, and single ones; a large score sets the ranks' sums far apart. Without
    ids the rows are normalised."""
    whole = problem(17, CANDIDATES, 5, ids=ids, l2_normalize=not ids)
    whole.tensors["bias"][3] += 40
    given = arguments_of(whole)
    leaves = leaves_of(given)
    want = linear_logp(**given)
    hidden_grad, weight_grad, bias_grad, temperature_grad = gradients(want, leaves)
    mine = slice(cuts[rank], cuts[rank + 1])
    right = (hidden_grad, weight_grad[mine], bias_grad[mine], temperature_grad)
    shard = given | {name: value.detach().clone() for name, value in given.items() if name != "l2_normalize"}
    for name in ("weight", "bias", *(("candidate_ids",) if ids else ())):
        shard[name] = shard[name][mine].clone()

    def sharded(operands):
        group = dist.group.WORLD
        return linear_logp_sharded(**operands, group=group, first_row=cuts[rank], num_rows=CANDIDATES)

    leaves = [leaf.requires_grad_() for leaf in leaves_of(shard)]
    got = sharded(shard)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    for one, other in zip(gradients(got, leaves), right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    for name, other in zip(("hidden", "weight", "bias", "temperature"), right, strict=True):
        plain = shard | {key: value.detach() for key, value in shard.items() if key != "l2_normalize"}
        leaf = plain[name].requires_grad_()
        (alone,) = gradients(sharded(plain), [leaf])
        torch.testing.assert_close(alone, other, rtol=1e-11, atol=1e-11)


def nothing_left(rank: int) -> None:
    """Every candidate of every rank is an accidental hit of row 0, which is ignored."""
    hidden = torch.randn(2, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weight = torch.randn(4, 3, requires_grad=True)
    logp, lse = linear_logp_sharded(
        hidden,
        weight,
        torch.tensor([-100, 5]),
        group=dist.group.WORLD,
        first_row=4 * rank,
        num_rows=8,
        candidate_ids=torch.full((4,), 7),
        target_ids=torch.tensor([7, 8]),
    )
    assert lse[0] == -torch.inf and logp[0] == 0 and logp[1] < 0
    (logp.sum() + lse[1]).backward()
    assert not hidden.grad[0].any() and hidden.grad[1].isfinite().all() and weight.grad.isfinite().all()


def rank_main(rank: int, folder: str) -> None:
    """All checks in one pair of processes: starting them takes longer than they do."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    try:
        for cuts in ((0, 12, CANDIDATES), (0, 0, CANDIDATES)):  # equal parts; a rank without any
            for ids in (False, True):
                compare(rank, cuts, ids)
        nothing_left(rank)
    finally:
        dist.destroy_process_group()


def test_both_ranks_have_the_outputs_and_gradients_of_the_whole(tmp_path):
    run_ranks(rank_main, str(tmp_path))


def single(**changes):
    given = {"hidden": torch.zeros(2, 3), "weight": torch.zeros(4, 3), "target": torch.tensor([0, 9])}
    return linear_logp_sharded(**given, group=None, **({"first_row": 0, "num_rows": 10} | changes))


def test_targets_are_checked_against_the_whole_weight():
    with pytest.raises(
        ValueError, match="target of row 1 is 9, which is no row of weight: allowed are 0 to 8"
    ):
        single(num_rows=9)
    with pytest.raises(
        ValueError, match="first_row = 7 and the 4 rows of weight must lie within the num_rows"
    ):
        single(first_row=7)
