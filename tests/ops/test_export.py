"""The ops inside traced graphs: one graph for all batch sizes and lengths, equal to eager."""

import pytest
import torch
from torch import Tensor, nn

from recsys.ops import (
    AttentionMask,
    RelativeBias,
    SequenceLayout,
    bucket_embedding,
    gather_rows,
    hstu_attention,
    offsets_from_lengths,
    segment_sum,
    softmax_attention,
)
from tests.ops.harness import assert_serves, assert_trained_by_one_graph, exported
from tests.tools.packaged import assert_packaged

CONTEXTUAL, HEADS, DIM, V_DIM = 2, 2, 4, 3


class Scorer(nn.Module):
    """Everything that a model does with a layout: assemble, attend, truncate, attend, take the targets.

    The lengths are inputs, so totals come from sizes of other inputs; `carrier` [max_len] holds no numbers.
    """

    def __init__(self, tail_len: int | None, softmax: bool = True) -> None:
        super().__init__()
        self.tail_len, self.softmax = tail_len, softmax
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
        scores = hstu_attention(q, k, v, layout, mask, scale_len=16, bias=bias)
        if self.softmax:
            scores = torch.cat([scores, softmax_attention(q, k, v, layout, mask)], dim=1)
        scores = scores.flatten(1)
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
BATCHES = [inputs(shapes, spare) for spare, shapes in enumerate(OTHERS)]
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
TAILS = pytest.mark.parametrize("tail_len", [pytest.param(None, marks=pytest.mark.slow), 4])


@TAILS
def test_an_exported_graph_serves_all_sizes(tail_len):
    model = Scorer(tail_len).eval()
    program = exported(model, BATCHES[0])
    assert all(constraint.lower <= 2 for constraint in program.range_constraints.values())
    assert_serves(program.module(), model, BATCHES, **CLOSE)


class Front(nn.Module):
    """Puts rows together, adds positions and pools, with the kernels of a GPU."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 64))

    def forward(self, first, second, index, buckets, lengths):
        rows = gather_rows([first, second], index, backend="triton")
        rows = bucket_embedding(rows, [self.table], [buckets], scale=8.0, backend="triton")
        return rows, segment_sum(rows, lengths)


def rows_to_move(sizes: list[int], lengths: list[int]) -> tuple[Tensor, ...]:
    """Two sources with these numbers of rows, a map, buckets, and lengths of segments of as many tokens."""
    total = sum(lengths)
    index = torch.randint(-1, max(1, sum(sizes)), (total,)) if sum(sizes) else torch.full((total,), -1)
    sources = [torch.randn(size, 64) for size in sizes]
    tensors = (*sources, index, torch.randint(9, (total,)), torch.tensor(lengths, dtype=torch.int64))
    return tuple(tensor.to("cuda") for tensor in tensors)


MOVED = [
    ([5, 7], [4, 9, 2]),
    ([1, 0], [1]),
    ([0, 3], [0, 0]),
    ([3000, 40], [2000, 0, 1, 900]),
    ([0, 0], [2]),
]


@pytest.mark.slow
@pytest.mark.parametrize("tail_len", [None, 4])
def test_a_package_serves_all_sizes_in_four_threads_without_this_code(tail_len, tmp_path):
    model = Scorer(tail_len).eval()
    with torch.no_grad():
        assert_packaged(exported(model, BATCHES[0]), model, BATCHES, tmp_path)


@pytest.mark.gpu
@pytest.mark.slow
def test_a_package_of_kernels_serves_all_sizes_in_four_threads_without_this_code(tmp_path):
    model, batches = Front().to("cuda").eval(), [rows_to_move(*sizes) for sizes in MOVED]
    with torch.no_grad():
        assert_packaged(exported(model, batches[0]), model, batches, tmp_path, atol=1e-4)


@pytest.mark.parametrize("softmax", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_compiled_training_step_has_the_gradients_of_eager(softmax):
    model = Scorer(tail_len=None, softmax=softmax)
    batches = [inputs(shapes) for shapes in (EXAMPLE, [(2, 2), (0, 3), (30, 2)])]
    assert_trained_by_one_graph(model, batches, lambda *_: list(model.parameters()), rtol=1e-4, atol=1e-5)
