"""The Hopper kernel of `top_k` on a CPU: units, barriers, buffers, by `tests/tools/gluon_emulator.py`."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")

from recsys.ops.top_k import sm90_launch, triton_launch
from tests.tools.gluon_emulator import Emulated

SIZES = sm90_launch.SIZES[128]


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setattr(sm90_launch, "coarse_kernel", Emulated(sm90_launch.coarse_kernel))
    for module in (sm90_launch, triton_launch):
        monkeypatch.setattr(module, "num_processors", lambda device: 3)


@pytest.mark.parametrize("part", [1, 3, 64])
@pytest.mark.parametrize(
    "sizes",
    [
        SIZES,
        SIZES._replace(group=64, stages=2, strips=3, halves=1),
        SIZES._replace(group=256, stages=3, strips=2, halves=1),
        SIZES._replace(stages=1, strips=4, halves=1),
    ],
)
@pytest.mark.parametrize(("queries", "items", "width"), [(1, 100, 8), (300, 2000, 64), (257, 130, 40)])
def test_the_best_of_each_group(queries, items, width, sizes, part, monkeypatch):
    monkeypatch.setattr(triton_launch, "PART", part)
    draw = torch.Generator().manual_seed(items)
    q, x = (torch.randn(n, width, generator=draw).bfloat16() for n in (queries, items))
    groups = -(-items // sizes.group)
    maxima = torch.full((queries, groups + 3), -77, dtype=torch.int32)
    sm90_launch.launch_coarse(q, x, maxima, groups, sizes)
    scores = q.float() @ x.float().T
    scores = torch.nn.functional.pad(scores, (0, groups * sizes.group - items))  # zeros: as the kernel says
    want = scores.view(queries, groups, sizes.group).amax(2)
    found = maxima[:, :groups].contiguous()
    assert (found & 1 == 0).all()
    torch.testing.assert_close(found.view(torch.float32), want)
    assert (maxima[:, groups:] == -77).all()
