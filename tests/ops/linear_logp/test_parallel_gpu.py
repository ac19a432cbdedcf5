"""`linear_logp_sharded` by the kernels: two processes, each with its rows of the weight, on one GPU."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from recsys.ops import last_backend, linear_logp
from recsys.ops.linear_logp.parallel import linear_logp_sharded
from tests.ops.harness import gradients
from tests.ops.linear_logp.problems import arguments_of, leaves_of, problem

pytestmark = pytest.mark.gpu

CANDIDATES = 3000
CUTS = (0, 1300, CANDIDATES)


def compare(rank: int, backend: str, full: bool) -> None:
    """Outputs and all gradients against the reference over the whole weight, in float64."""
    whole = problem(500, CANDIDATES, 72, bias=full, ids=full)
    whole.tensors["hidden"] /= 72**0.5
    whole = whole.cast(torch.bfloat16)
    exact = arguments_of(whole.cast(torch.float64))
    mine = slice(CUTS[rank], CUTS[rank + 1])
    shard = {name: value.detach().cuda() for name, value in arguments_of(whole).items()}
    for name in ("weight", "bias", "candidate_ids"):
        if name in shard:
            shard[name] = shard[name][mine].clone()
    leaves = [leaf.requires_grad_() for leaf in leaves_of(shard)]
    options = {"l2_normalize": full}
    want = linear_logp(**exact, **options)
    place = {"group": dist.group.WORLD, "first_row": CUTS[rank], "num_rows": CANDIDATES}
    got = linear_logp_sharded(**shard, **options, **place, backend=backend)
    assert last_backend("linear_logp") == backend
    whole_grads = gradients(want, leaves_of(exact))
    grads = [grad[mine] if grad.shape[:1] == (CANDIDATES,) else grad for grad in whole_grads]
    found = [*got, *gradients(got, leaves)]
    for ours, right in zip(found, [*want, *grads], strict=True):
        assert (ours.detach().cpu().double() - right).norm() <= 2**-7 * right.norm() + 1e-4


def rank_main(rank: int, folder: str, backend: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    try:
        for full in (False, True) if backend == "triton" else (False,):
            compare(rank, backend, full)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["triton", "sm90"])
def test_both_ranks_have_the_outputs_and_gradients_of_the_whole(backend, tmp_path):
    if backend == "sm90" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    mp.spawn(rank_main, args=(str(tmp_path), backend), nprocs=2)
