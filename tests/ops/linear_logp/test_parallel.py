"""`linear_logp_sharded` on two ranks, by kernels on one GPU, against `linear_logp` over the whole weight."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from recsys.ops import last_backend, linear_logp
from recsys.ops.linear_logp import linear_logp_sharded
from tests.ops.harness import REFERENCE, Problem, Runner, assert_close, gradients, runners
from tests.ops.linear_logp.problems import FLOATS, arguments_of, leaves_of, problem
from tests.tools.forks import run_ranks


def compare(rank: int, runner: Runner, whole: Problem, cuts: tuple[int, int, int]) -> None:
    """Outputs and all gradients at once; of the reference also single ones."""
    mine, place = slice(cuts[rank], cuts[rank + 1]), {"first_row": cuts[rank], "num_rows": cuts[2]}

    def own(name, value):
        value = value.detach().to(runner.device)
        return value[mine].clone() if name == "weight" else value

    exact = arguments_of(whole.cast(torch.float64))
    want = linear_logp(**exact)
    names = [name for name in FLOATS if name in exact]
    grads = dict(zip(names, gradients(want, leaves_of(exact)), strict=True))
    right = [own(name, grads[name]).cpu() for name in names]
    options = {"l2_normalize": exact.pop("l2_normalize", False), "backend": runner.backend, **place}
    given = arguments_of(whole)
    given.pop("l2_normalize", None)

    def sharded(operands):
        return linear_logp_sharded(**operands, group=dist.group.WORLD, **options)

    def shard(*with_gradients):
        operands = {name: own(name, value) for name, value in given.items()}
        return operands, [operands[name].requires_grad_() for name in with_gradients]

    operands, leaves = shard(*names)
    got = sharded(operands)
    assert last_backend("linear_logp") == runner.backend
    shard_grads = gradients(got, leaves)
    if runner != REFERENCE:
        for ours, exactly in zip([*got, *shard_grads], [*want, *right], strict=True):
            assert (ours.detach().cpu().double() - exactly).norm() <= 2**-7 * exactly.norm() + 1e-4
        return
    assert_close(got, want, 1e-12)
    assert_close(shard_grads, right, 1e-11)
    for name, exactly in zip(names, right, strict=True):
        operands, leaves = shard(name)
        assert_close(gradients(sharded(operands), leaves), [exactly], 1e-11)


def compare_all(rank: int, runner: Runner) -> None:
    """All checks in one pair of processes: starting them takes longer than they do."""
    if runner == REFERENCE:
        for cuts in ((0, 12, 24), (0, 0, 24)):  # equal parts; a rank without any
            for unit in (False, True):
                whole = problem(17, 24, 5, bias=False, ids=False, l2_normalize=unit)
                whole.tensors["weight"][3] *= 20  # sets the ranks' sums far apart
                compare(rank, runner, whole, cuts)
        return
    for unit in (False, True) if runner.backend == "triton" else (False,):
        whole = problem(500, 3000, 72, bias=False, ids=False, l2_normalize=unit)
        whole.tensors["hidden"] /= 72**0.5
        compare(rank, runner, whole.cast(torch.bfloat16), (0, 1300, 3000))


def rank_main(rank: int, folder: str, backend: str, device: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    try:
        compare_all(rank, Runner(backend, device))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("runner", runners("reference", "triton", "sm90", interpreter=False))
def test_both_ranks_have_the_outputs_and_gradients_of_the_whole(runner, tmp_path):
    if runner == REFERENCE:
        run_ranks(rank_main, str(tmp_path), *runner)
    else:
        mp.spawn(rank_main, args=(str(tmp_path), *runner), nprocs=2)


def single(**changes):
    given = {"hidden": torch.zeros(2, 3), "weight": torch.zeros(4, 3), "target": torch.tensor([0, 9])}
    return linear_logp_sharded(**given, group=None, **({"first_row": 0, "num_rows": 10} | changes))


def test_targets_are_checked_against_the_whole_weight():
    with pytest.raises(
        ValueError, match="target of row 1 is 9, which is not a row of weight: allowed are 0 to 8"
    ):
        single(num_rows=9)
    with pytest.raises(
        ValueError, match="first_row = 7 and the 4 rows of weight must lie within the num_rows"
    ):
        single(first_row=7)
