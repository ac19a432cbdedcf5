"""The ops inside traced graphs: one graph for all batch sizes and lengths, equal to eager."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim
from torch.fx.experimental import _config as fx_config

from recsys.ops import (
    AttentionMask,
    RelativeBias,
    SequenceLayout,
    gather_rows,
    hstu_attention,
    offsets_from_lengths,
    segment_sum,
    softmax_attention,
)

CONTEXTUAL, HEADS, DIM, V_DIM = 2, 2, 4, 3


class Scorer(nn.Module):
    """Everything that a model does with a layout: assemble, attend, truncate, attend, take the targets.

    The lengths are inputs, so totals come from sizes of other inputs; `carrier` [max_len] holds no numbers.
    """

    def __init__(self, tail_len: int | None) -> None:
        super().__init__()
        self.tail_len = tail_len
        self.project = nn.Linear(8, HEADS * (2 * DIM + V_DIM))
        self.position_table = nn.Parameter(torch.randn(HEADS, 6))
        self.time_table = nn.Parameter(torch.randn(30))

    def forward(
        self,
        contextual: Tensor,
        uih: Tensor,
        targets: Tensor,
        lengths: Tensor,
        num_targets: Tensor,
        timestamps: Tensor,
        carrier: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        layout = SequenceLayout.trusted(
            lengths,
            offsets_from_lengths(lengths),
            num_targets,
            CONTEXTUAL,
            total_len=timestamps.shape[0],
            max_len=carrier.shape[0],
            total_targets=targets.shape[0],
        )
        x = gather_rows(torch.cat([contextual, uih, targets]), layout.assemble_index())
        pooled = segment_sum(x, layout.lengths)
        mask = AttentionMask(window=3, prefix=1, target_group_size=2)
        if self.tail_len is not None:
            layout, index = layout.truncate(self.tail_len)
            x, timestamps = gather_rows(x, index), gather_rows(timestamps, index)
        q, k, v = self.project(x).view(-1, HEADS, 2 * DIM + V_DIM).split([DIM, DIM, V_DIM], dim=2)
        bias = RelativeBias(self.position_table, self.time_table, timestamps, timestamps + 100)
        silu = hstu_attention(q, k, v, layout, mask, scale_len=16, bias=bias)
        soft = softmax_attention(q, k, v, layout, mask)
        scores = torch.cat([silu, soft], dim=1).flatten(1)
        return gather_rows(scores, layout.targets_only().index), pooled, layout.kinds()


def inputs(shapes: list[tuple[int, int]], spare: int = 0) -> tuple[Tensor, ...]:
    """A batch of (history, targets) samples; `spare`: by how much the given max_len is too long."""
    uih, targets = (torch.tensor(column, dtype=torch.int64) for column in zip(*shapes, strict=True))
    lengths = CONTEXTUAL + uih + targets
    return (
        torch.randn(len(shapes) * CONTEXTUAL, 8),
        torch.randn(int(uih.sum()), 8),
        torch.randn(int(targets.sum()), 8),
        lengths,
        targets,
        1_763_000_000 + torch.randint(0, 10**7, (int(lengths.sum()),)),
        torch.empty(int(lengths.max()) + spare),
    )


EXAMPLE = [(5, 2), (3, 4), (9, 1)]
OTHERS = [
    EXAMPLE,
    [(0, 0), (0, 3), (7, 1), (20, 5)],  # a sample without history, one with contextual tokens only
    [(1, 1)],
    [(4, 0)] * 10,  # no targets
    [(0, 0), (0, 0)],
]


def export(model: nn.Module) -> torch.export.ExportedProgram:
    example = inputs(EXAMPLE)
    with torch.no_grad(), fx_config.patch(backed_size_oblivious=True):
        return torch.export.export(model, example, dynamic_shapes=tuple({0: Dim.AUTO} for _ in example))


def assert_equal_to_eager(compiled, model: nn.Module) -> None:
    with torch.no_grad():
        for spare, shapes in enumerate(OTHERS):
            batch = inputs(shapes, spare)
            for got, want in zip(compiled(*batch), model(*batch), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tail_len", [None, 4])
def test_an_exported_graph_serves_all_sizes(tail_len):
    model = Scorer(tail_len).eval()
    program = export(model)
    assert all(constraint.lower <= 2 for constraint in program.range_constraints.values())
    assert_equal_to_eager(program.module(), model)


LOAD_AND_RUN = """
import sys, torch
from concurrent.futures import ThreadPoolExecutor
torch.set_num_threads(1)
program, batches = torch._inductor.aoti_load_package(sys.argv[1]), torch.load(sys.argv[2])
with ThreadPoolExecutor(4) as pool:
    found = list(pool.map(lambda batch: program(*batch), batches * 20))
torch.save(found, sys.argv[3])
"""


def load_and_run(program: torch.export.ExportedProgram, batches: list, folder: Path) -> list:
    """The outputs of the packaged program for the batches, 20 times over, by 4 threads of a fresh process
    that imports torch only; a deadlock would keep it past its time. About 30 s, nearly all of it in the C++
    compiler."""
    package = torch._inductor.aoti_compile_and_package(
        program,
        package_path=str(folder / "model.pt2"),
        inductor_configs={"aot_inductor.check_lowerbound": False},
    )
    torch.save(batches, folder / "batches")
    arguments = [package, str(folder / "batches"), str(folder / "outputs")]
    subprocess.run([sys.executable, "-c", LOAD_AND_RUN, *arguments], check=True, cwd=folder, timeout=120)
    return torch.load(folder / "outputs")


@pytest.mark.slow
@pytest.mark.parametrize("tail_len", [None, 4])
def test_a_package_serves_all_sizes_in_four_threads_without_this_code(tail_len, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "/usr/bin/g++")
    model = Scorer(tail_len).eval()
    batches = [inputs(shapes, spare) for spare, shapes in enumerate(OTHERS)]
    with torch.no_grad():
        found = load_and_run(export(model), batches, tmp_path)
        for batch, outputs in zip(batches * 20, found, strict=True):
            for got, want in zip(outputs, model(*batch), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_compiled_training_step_has_the_gradients_of_eager():
    """`torch.compile` with symbolic sizes, one graph, traced once for two batches."""
    counter = CompileCounterWithBackend("aot_eager")
    model = Scorer(tail_len=None)
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for shapes in ([(5, 2), (3, 4), (9, 1)], [(2, 2), (8, 1), (0, 3), (4, 0), (30, 2)]):
        batch = inputs(shapes)
        gradients = []
        for call in (compiled, model):
            scores, _, _ = call(*batch)
            cotangent = torch.randn(scores.shape, generator=torch.Generator().manual_seed(1))
            gradients.append(torch.autograd.grad(scores, list(model.parameters()), cotangent))
        for got, want in zip(*gradients, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1
