"""`linear_logp_sharded` by the kernels: two processes, each with its rows of the weight, on one GPU."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from recsys.ops import last_backend, linear_logp
from recsys.ops.linear_logp.parallel import linear_logp_sharded
from tests.ops.linear_logp.problems import gradients, leaves_of, problem

pytestmark = pytest.mark.gpu

CANDIDATES = 3000
CUTS = (0, 1300, CANDIDATES)


def compare(rank: int, backend: str, full: bool) -> None:
    """Outputs and all gradients against the reference over the whole weight, in float64."""
    given = problem(500, CANDIDATES, 72, dtype=torch.bfloat16, bias=full, ids=full)
    given["hidden"] = given["hidden"] / 72**0.5
    exact = {name: value.double() if value.is_floating_point() else value for name, value in given.items()}
    mine = slice(CUTS[rank], CUTS[rank + 1])
    own = {name: value.cuda() for name, value in given.items()}
    for name in ("weight", "bias", "candidate_ids"):
        if name in own:
            own[name] = own[name][mine].clone()
    options = {"l2_normalize": full}
    leaves, own_leaves = leaves_of(exact), leaves_of(own)
    want = linear_logp(**exact, **options)
    place = {"group": dist.group.WORLD, "first_row": CUTS[rank], "num_rows": CANDIDATES}
    got = linear_logp_sharded(**own, **options, **place, backend=backend)
    assert last_backend("linear_logp") == backend
    of_rank = [one[mine] if one.shape[:1] == (CANDIDATES,) else one for one in gradients(want, leaves)]
    found = [*got, *gradients(got, own_leaves)]
    for ours, right in zip(found, [*want, *of_rank], strict=True):
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
