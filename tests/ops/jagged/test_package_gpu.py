"""The ops that move rows in a package of AOTInductor on a GPU: their kernels, all sizes, several threads."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.fx.experimental import _config as fx_config

from recsys.inference.program import enter_device
from recsys.ops import bucket_embedding, gather_rows, segment_sum

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

DEVICE = "cuda"


class Front(nn.Module):
    """Puts rows together, adds positions, pools."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 64))

    def forward(self, first, second, index, buckets, lengths):
        rows = gather_rows([first, second], index, backend="triton")
        rows = bucket_embedding(rows, [self.table], [buckets], scale=8.0, backend="triton")
        return rows, segment_sum(rows, lengths)


def batch(sizes, lengths):
    """Rows of both sources, and the lengths of segments of as many tokens."""
    total = sum(lengths)
    index = torch.randint(-1, max(1, sum(sizes)), (total,)) if sum(sizes) else torch.full((total,), -1)
    given = [torch.randn(size, 64) for size in sizes]
    tensors = (*given, index, torch.randint(9, (total,)), torch.tensor(lengths, dtype=torch.int64))
    return tuple(one.to(DEVICE) for one in tensors)


def test_one_package_for_all_sizes_in_four_threads(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "/usr/bin/g++")
    model, example = Front().to(DEVICE).eval(), batch([5, 7], [4, 9, 2])
    with torch.no_grad(), fx_config.patch(backed_size_oblivious=True):
        program = torch.export.export(model, example, dynamic_shapes=tuple({0: Dim.AUTO} for _ in example))
        targets = {str(node.target) for node in program.graph.nodes}
        assert "recsys.gather_rows_triton.default" in targets
        path = torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(tmp_path / "front.pt2"),
            inductor_configs={"aot_inductor.check_lowerbound": False},
        )
        package = torch._inductor.aoti_load_package(path)
        shapes = [
            ([5, 7], [4, 9, 2]),
            ([1, 0], [1]),
            ([0, 3], [0, 0]),
            ([3000, 40], [2000, 0, 1, 900]),
            ([0, 0], [2]),
        ]
        batches = [batch(*shape) for shape in shapes]
        wanted = [model(*one) for one in batches]

        def run(number):
            enter_device(torch.device(DEVICE))
            return number % len(batches), package(*batches[number % len(batches)])

        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(run, range(100)))
    for number, outputs in found:
        for got, want in zip(outputs, wanted[number], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
