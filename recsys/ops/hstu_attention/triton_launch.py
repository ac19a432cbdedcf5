"""From tensors to kernel launches: sizes of the blocks, grids, and the sums that a second pass finishes.

The functions here compute and do not record gradients; `triton_ops` makes them differentiable. They only use
what a compiler can trace: `wrap` stands around each kernel, the identity in eager mode and
`torch.library.wrap_triton` in a graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from recsys.ops.hstu_attention.blocks import ROOMY, Blocks, blocks_of, keys_kernels, padded_dim
from recsys.ops.hstu_attention.triton_backward import keys_kernel, rows_kernel
from recsys.ops.hstu_attention.triton_forward import forward_kernel
from recsys.ops.hstu_attention.triton_tile import RAGGED_ROWS
from recsys.ops.hstu_attention.work_list import key_work, row_work
from recsys.ops.layout import SequenceLayout
from recsys.ops.mask import AttentionMask
from recsys.ops.relative_bias import LOG_BUCKET, RelativeBias
from recsys.ops.triton_backend import num_processors

Wrap = Callable[[Any], Any]

ANY_ROWS = 0x7FFF0000
"""More than any coordinate, and a size that a descriptor may have."""

DESCRIPTORS = True
"""Whether descriptors are used where they can be; for tests."""

MAX_EDGE = 2**62
"""No difference of two times in seconds comes near it."""


@dataclass(frozen=True)
class Problem:
    """What one call computes, apart from q, k and v."""

    layout: SequenceLayout
    mask: AttentionMask
    alpha: float
    scale_len: float
    bias: RelativeBias | None

    @property
    def num_contextual(self) -> int:
        """Contextual tokens at the start of each sample."""
        return self.layout.num_contextual


class Gradients(NamedTuple):
    """Of q, k and v; of the tables when they were asked for."""

    q: Tensor
    k: Tensor
    v: Tensor
    position_table: Tensor | None
    time_table: Tensor | None


PROGRAMS_PER_PROCESSOR = 2
"""Of `rows_kernel` when it sums table gradients, which need memory for each program."""


def unwrapped(kernel: Any) -> Any:
    """Around a kernel in eager mode."""
    return kernel


def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem, wrap: Wrap = unwrapped) -> Tensor:
    """`hstu_attention` [T, H, V]; the arguments have been validated."""
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    if q.shape[0] == 0:
        return out
    q, k, v = map(with_dense_rows, (q, k, v))
    described = can_describe(problem, wrap, q, k, v)
    blocks = blocks_for("described" if described else "forward", q, v, problem)
    items = row_work(problem.mask, problem.layout, blocks.rows, blocks.keys)
    num_heads = q.shape[1]
    wrap(forward_kernel)[(items.shape[0] * num_heads,)](
        *operands(described, (q, blocks.rows), (k, blocks.keys), (v, blocks.keys)),
        out,
        items,
        items.shape[0],
        num_heads,
        *strides(q, k, v),
        *scalars(problem),
        *bias_arguments(problem, items),
        DESCRIBED=described,
        **constants(problem, q, v, blocks),
    )
    return out


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    *,
    tables: bool,
    deterministic: bool,
    wrap: Wrap = unwrapped,
) -> Gradients:
    """All gradients; those of the bias's tables if `tables`. They are deterministic, asked for or not."""
    grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    grad_k = torch.empty_like(k, memory_format=torch.contiguous_format)
    grad_v = torch.empty_like(v, memory_format=torch.contiguous_format)
    bias = problem.bias if tables else None
    out = Gradients(grad_q, grad_k, grad_v, None, None)
    if q.shape[0] == 0:
        if bias is None:
            return out
        return out._replace(
            position_table=torch.zeros_like(bias.position_table), time_table=torch.zeros_like(bias.time_table)
        )
    q, k, v, grad_out = map(with_dense_rows, (q, k, v, grad_out))
    for kernel in keys_kernels(q.dtype, int(q.shape[2]), int(v.shape[2]), problem.bias is not None):
        _launch_keys(kernel, q, k, v, grad_out, out, problem, wrap)
    return _launch_rows(q, k, v, grad_out, out, problem, bias, wrap)


def _launch_keys(
    kernel: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    out: Gradients,
    problem: Problem,
    wrap: Wrap,
) -> None:
    """Fills in dK and dV, or one of them: see `keys_kernels`."""
    blocks = blocks_for(kernel, q, v, problem)
    items = key_work(problem.mask, problem.layout, blocks.keys, blocks.rows)
    num_heads = q.shape[1]
    wrap(keys_kernel)[(items.shape[0] * num_heads,)](
        q,
        k,
        v,
        grad_out,
        out.k,
        out.v,
        items,
        items.shape[0],
        num_heads,
        *strides(q, k, v, grad_out),
        *scalars(problem),
        *bias_arguments(problem, items),
        GRAD_K=kernel != "grad_v",
        GRAD_V=kernel != "grad_k",
        **constants(problem, q, v, blocks),
    )


def _launch_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    out: Gradients,
    problem: Problem,
    bias: RelativeBias | None,
    wrap: Wrap,
) -> Gradients:
    """Fills in dQ; with `bias` also makes the gradients of its tables."""
    blocks = blocks_for("rows", q, v, problem)
    items = row_work(problem.mask, problem.layout, blocks.rows, blocks.keys)
    num_heads = q.shape[1]
    workers, lines, buckets = items.shape[0], 0, 16
    positions = times = grad_out.new_empty(0, dtype=torch.float32)
    if bias is not None:
        workers = max(1, min(workers, PROGRAMS_PER_PROCESSOR * num_processors(q.device) // num_heads))
        lines = -(-bias.position_table.shape[-1] // blocks.keys)
        buckets = padded_dim(int(bias.time_table.shape[-1]))
        positions = q.new_zeros(workers, num_heads, (lines + 2) * blocks.keys, dtype=torch.float32)
        times = q.new_empty(workers, num_heads, buckets, dtype=torch.float32)
    wrap(rows_kernel)[(workers * num_heads,)](
        q,
        k,
        v,
        grad_out,
        out.q,
        items,
        items.shape[0],
        num_heads,
        *strides(q, k, v, grad_out),
        *scalars(problem),
        *bias_arguments(problem, items),
        positions,
        times,
        lines,
        TABLES=bias is not None,
        BUCKETS=buckets,
        **constants(problem, q, v, blocks),
    )
    if bias is None:
        return out
    by_position = _fold(positions.sum(0)[:, blocks.keys :], positions.sum(0)[:, : blocks.keys], bias)
    by_time = times.sum(0)[:, : bias.time_table.shape[-1]]
    return out._replace(
        position_table=_like_table(by_position / problem.scale_len, bias.position_table),
        time_table=_like_table(by_time / problem.scale_len, bias.time_table),
    )


def _fold(distances: Tensor, negative: Tensor, bias: RelativeBias) -> Tensor:
    """[H, P] from sums by distance [H, > P]: distances outside of the table belong to its ends."""
    last = bias.position_table.shape[-1] - 1
    sums = distances[:, : last + 1].clone()
    sums[:, 0] += negative.sum(1)
    sums[:, last] += distances[:, last + 1 :].sum(1)
    return sums


def _like_table(sums: Tensor, table: Tensor) -> Tensor:
    """[H, buckets] to the table's shape and dtype: a table without heads gets the sum over them."""
    return (sums if table.dim() == 2 else sums.sum(0)).to(table.dtype)


def blocks_for(kernel: str, q: Tensor, v: Tensor, problem: Problem) -> Blocks:
    """The sizes for one kernel of a call."""
    biased = problem.bias is not None
    return blocks_of(kernel, q.dtype, int(q.shape[2]), int(v.shape[2]), biased, is_roomy(q.device))


@lru_cache(maxsize=16)
def is_roomy(device: torch.device) -> bool:
    """Whether the tiles of Hopper fit; also on a CPU, which may only be tracing for a GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= ROOMY


def with_dense_rows(tensor: Tensor) -> Tensor:
    """The kernels take any strides but that of the last dimension."""
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def can_describe(problem: Problem, wrap: Wrap, *tensors: Tensor) -> bool:
    """Whether the copy engine of Hopper and later can fetch blocks of all these tensors [T, H, D].

    Rows of 16-byte steps, heads side by side within a row, no columns to cut off. Graphs do without: they
    would have to make the descriptors. Every GPU with so much shared memory has a copy engine.
    """
    device = tensors[0].device
    if not DESCRIPTORS or problem.bias is not None or wrap is not unwrapped or device.type != "cuda":
        return False
    return is_roomy(device) and all(map(_is_describable, tensors))


def _is_describable(tensor: Tensor) -> bool:
    row, head, _ = tensor.stride()
    _, num_heads, dim = tensor.shape
    step = 16 // tensor.element_size()
    aligned = row % step == 0 and head % step == 0 and tensor.data_ptr() % 16 == 0
    whole = dim == max(64, padded_dim(dim)) and tensor.element_size() == 2
    return aligned and whole and 0 <= head and (num_heads - 1) * head + dim <= row


def operands(described: bool, *tensors: tuple[Tensor, int]) -> list[Tensor | TensorDescriptor]:
    """Tensors as they are, or as descriptors of blocks of so many rows."""
    return [ragged_descriptor(tensor, rows) if described else tensor for tensor, rows in tensors]


def ragged_descriptor(tensor: Tensor, rows: int) -> TensorDescriptor:
    """Blocks of `rows` rows of one head of [T, H, D], cut off at the end of a sample.

    A block at (2^30, end of the sample, 2^30 - length of the sample + row, column) holds the rows of the
    sample from `row` on. The third coordinate ends at 2^30, so rows past the sample are out of bounds: read
    as zeros, not written. The first one is a way back: 2^30 steps of 2^34 - stride elements are -2^30 rows,
    modulo 2^64 bytes. Source: `triton.tools.ragged_tma`.
    """
    row, head, _ = tensor.stride()
    _, num_heads, dim = tensor.shape
    return TensorDescriptor(
        tensor,
        shape=[ANY_ROWS, ANY_ROWS, RAGGED_ROWS.value, (num_heads - 1) * head + dim],
        strides=[2**34 - row, row, row, 1],
        block_shape=[1, 1, rows, dim],
    )


def strides(*tensors: Tensor) -> list[int]:
    """Of the rows and of the heads of each tensor."""
    return [tensor.stride(dim) for tensor in tensors for dim in (0, 1)]


def scalars(problem: Problem) -> list[int | float]:
    """The numbers of a problem, from `alpha` to `group_size`."""
    mask = problem.mask
    return [
        problem.alpha,
        1.0 / problem.scale_len,
        problem.num_contextual,
        mask.window or 0,
        mask.prefix,
        mask.target_group_size,
    ]


def bias_arguments(problem: Problem, unused: Tensor) -> list[Tensor | int]:
    """Tables in float32, the edges of the time buckets, both times, strides of a head and sizes."""
    bias = problem.bias
    if bias is None:
        return [unused, unused, unused, unused, unused, 0, 0, 1, 1]
    position, time = (table.detach().float().contiguous() for table in (bias.position_table, bias.time_table))
    edges = time_edges(int(time.shape[-1]))  # a constant of the model, also in a traced graph
    return [
        position,
        time,
        problem.layout.memo(("time_edges", len(edges)), lambda: _constant(edges, time.device)),
        bias.timestamps.contiguous(),
        bias.next_timestamps.contiguous(),
        position.stride(0) if position.dim() == 2 else 0,
        time.stride(0) if time.dim() == 2 else 0,
        position.shape[-1],
        time.shape[-1],
    ]


def _constant(numbers: Sequence[int], device: torch.device) -> Tensor:
    """int64 [n] on the device, without waiting for it."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        return torch.tensor(numbers, device=device)
    return torch.tensor(numbers, pin_memory=True).to(device, non_blocking=True)


def constants(problem: Problem, q: Tensor, v: Tensor, blocks: Blocks) -> dict[str, Any]:
    """What the kernels are compiled for, by the names of their parameters."""
    mask, is_float32 = problem.mask, q.dtype == torch.float32
    return {
        "D": int(q.shape[2]),
        "V": int(v.shape[2]),
        "BLOCK_M": blocks.rows,
        "BLOCK_N": blocks.keys,
        "BLOCK_D": padded_dim(int(q.shape[2])),
        "BLOCK_V": padded_dim(int(v.shape[2])),
        "WINDOWED": mask.window is not None,
        "TARGET_WINDOW": mask.target_window,
        "GROUPED": mask.target_group_size > 1,
        "CONTEXTUAL_READS": mask.contextual_reads_history,
        "BIASED": problem.bias is not None,
        "FAST": q.device.type == "cuda" and not is_float32,
        "PRECISION": "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32",
        "num_warps": blocks.num_warps,
        "num_stages": blocks.num_stages,
    }


@lru_cache(maxsize=64)
def time_edges(num_buckets: int) -> tuple[int, ...]:
    """The least difference in seconds of each time bucket, and one that none reaches: exact by definition."""
    edges = [1]
    for bucket in range(1, num_buckets):
        low, high = max(edges[-1] - 1, 1), MAX_EDGE  # bucket(low) < bucket; the answer is in (low, high]
        while high - low > 1:
            middle = (low + high) // 2
            reached = math.log(middle) / LOG_BUCKET >= bucket
            low, high = (low, middle) if reached else (middle, high)
        edges.append(high)
    return (*edges, 2**63 - 1)
