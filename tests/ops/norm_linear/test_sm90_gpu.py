"""The Hopper kernel of a projection that goes through SiLU, on a GPU: against float64 and cuBLAS, odd sizes,
memory around it."""

import pytest
import torch
import torch.nn.functional as F

from recsys.ops.runtime import triton_support

pytestmark = pytest.mark.gpu

SHAPES = [(1, 64, 256), (129, 1024, 4096), (1000, 256, 1024), (5000, 520, 264), (20001, 768, 256)]


@pytest.fixture
def kernel():
    if missing := triton_support.missing_for_hopper():
        pytest.skip(missing)
    from recsys.ops.norm_linear import sm90_launch

    return sm90_launch


def tensors(rows, depth, columns, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = [
        torch.randn(size, generator=generator).to("cuda", dtype)
        for size in ((rows, depth), (columns, depth), (columns,))
    ]
    made[1] *= depth**-0.5
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_not_further_from_exact_than_twice_cublas(kernel, shape, dtype):
    x, weight, bias = tensors(*shape, dtype)
    exact, theirs = F.linear(x.double(), weight.double(), bias.double()), F.linear(x, weight, bias)
    found = kernel.project(x, weight, bias)
    pairs = [(found.before, theirs, exact), (found.active, F.silu(theirs), F.silu(exact))]
    for got, other, right in pairs:
        assert (got.double() - right).norm() <= 2 * (other.double() - right).norm() + 1e-6 * right.norm()
        assert (got.double() - right).abs().max() <= 2 * (other.double() - right).abs().max() + 1e-3


def test_rows_that_lie_apart_and_sizes_in_any_order(kernel):
    wide, weight, bias = tensors(3000, 512, 512, torch.bfloat16)
    x = wide[:, 64:320]
    weight = weight[:, :256]
    whole = F.linear(x.double(), weight.double(), bias.double())
    for rows in (3000, 1, 257, 2999, 64, 3000):
        got = kernel.project(x[:rows], weight, bias).before.double()
        assert (got - whole[:rows]).norm() <= 5e-3 * whole[:rows].norm()


def test_nothing_is_written_behind_the_last_row(kernel, monkeypatch):
    x, weight, bias = tensors(131, 64, 256, torch.bfloat16)
    rooms = [torch.full((400, 256), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    places = iter(rooms)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *size, **rest: next(places)[: size[0]])
        found = kernel.project(x, weight, bias)
    for out, room in zip(found, rooms, strict=True):
        assert out.data_ptr() == room.data_ptr()
        assert bool(out.isfinite().all()) and bool(room[131:].isnan().all())


def test_many_launches_in_a_row_are_those_of_one(kernel):
    sets = [tensors(*shape, torch.bfloat16, seed) for seed, shape in enumerate(SHAPES)]
    alone = [kernel.project(*one).active for one in sets]
    torch.cuda.synchronize()
    many = [kernel.project(*sets[number % len(sets)]).active for number in range(100)]
    for number, out in enumerate(many):
        assert torch.equal(out, alone[number % len(sets)])
