"""Launches of `linear_attention`: an autograd function in eager mode, library ops in graphs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import wrap_triton

from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.linear_attention.chunks import ChunkTable, chunk_table, chunk_table_of
from recsys.ops.linear_attention.triton_scan import backward_kernel, combine_kernel, forward_kernel
from recsys.ops.linear_attention.triton_scores import decay_sums_kernel, pair_gradients_kernel, scores_kernel
from recsys.ops.runtime.launch import Wrap, launch
from recsys.ops.runtime.registration import differentiable, traceable_op
from recsys.ops.runtime.triton_support import num_processors

CHUNK = 64
"""Tokens of a chunk, a power of two and at least 16."""

PROGRAMS_PER_PROCESSOR = 2
"""Samples are cut into segments until so many programs carry states at the same time. With the delta rule a
segment multiplies the state by a full matrix, so there each sample is one segment."""

SHORTEST_SEGMENT = 8
"""Chunks of a segment at least: each segment is gone through twice."""

TRACED_SEGMENT = 32
"""Chunks of a segment in a traced graph, which must serve batches of all sizes."""


class Problem(NamedTuple):
    """The tensors of a call, as the kernels read them, and the table of its chunks."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor | None
    initial_state: Tensor
    table: ChunkTable
    scale: float
    wrap: Wrap | None
    segmented: bool  # True if a sample may have more than one segment

    def constants(self, block_v: int, num_warps: int, **others: Any) -> dict[str, Any]:
        """The compile-time constants that most kernels share, and `others`."""
        heads, dim, v_dim = self.q.shape[1], self.q.shape[2], self.v.shape[2]
        strides = {
            f"{kind}_{name}": int(tensor.stride(axis))
            for kind, axis in (("STRIDE", 0), ("HEAD", 1))
            for name, tensor in (("Q", self.q), ("K", self.k), ("V", self.v))
        }
        return strides | {
            "H": int(heads),
            "D": int(dim),
            "V": int(v_dim),
            "C": CHUNK,
            "BLOCK_D": _block(dim),
            "BLOCK_V": block_v,
            "PER_HEAD": self.log_decay.dim() == 2,
            "DELTA": self.beta is not None,
            "PRECISION": "ieee" if self.q.dtype == torch.float32 else "tf32",
            **others,
            "num_warps": num_warps,
        }


class Prepared(NamedTuple):
    """Quantities of each chunk by itself; the last three are empty without the delta rule."""

    sums: Tensor  # float32 [T, H, D] or [T, H], decays from the chunk's first token on
    scores: Tensor  # [T, H, C]
    inverses: Tensor  # float32 [T, H, C]
    key_answers: Tensor  # [T, H, D]
    values: Tensor  # [T, H, V], without the delta rule v itself


class Gradients(NamedTuple):
    """Gradients of the arguments; that of beta is empty without the delta rule."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor
    initial_state: Tensor


class LinearAttentionFunction(torch.autograd.Function):
    """`apply(q, k, v, log_decay, beta, initial_state, layout, scale)`."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor | None,
        initial_state: Tensor,
        layout: SequenceLayout,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        per_segment = 0 if beta is not None else chunks_per_segment(q, v, layout.total_len, layout.max_len)
        table = chunk_table_of(layout, CHUNK, per_segment)
        ctx.facts = (table, scale, None, per_segment > 0)
        out, final = launch_forward(_problem(q, k, v, log_decay, beta, initial_state, *ctx.facts))
        ctx.save_for_backward(q, k, v, log_decay, beta, initial_state, final)
        return out, final

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
        *arguments, final = ctx.saved_tensors
        problem = _problem(*arguments, *ctx.facts)
        gradients = launch_backward(problem, final, grad_out, grad_final)
        if problem.beta is None:
            return (*gradients[:4], None, gradients.initial_state, None, None)
        return (*gradients, None, None)


def chunks_per_segment(q: Tensor, v: Tensor, total_len: int, max_len: int) -> int:
    """Chunks of history in a segment, a power of two; 0 if each sample is one."""
    programs = PROGRAMS_PER_PROCESSOR * num_processors(q.device)
    work = total_len // CHUNK * q.shape[1] * (-(-v.shape[2] // _scan_block_v(v.shape[2])))
    size = max(SHORTEST_SEGMENT, 1 << max(0, (work // programs).bit_length() - 1))
    return 0 if max_len <= size * CHUNK else size


def launch_forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """Output [T, H, V] and final state [B, H, D, V] in float32."""
    out = torch.empty_like(problem.v, memory_format=torch.contiguous_format)
    final = torch.empty_like(problem.initial_state, dtype=torch.float32)
    if problem.initial_state.numel() == 0:
        return out, final
    prepared = _prepare(problem)
    starts = _starts(problem, prepared)
    _scan(problem, prepared, starts, "out", out=out, final=final)
    return out, final


def launch_backward(problem: Problem, final: Tensor, grad_out: Tensor, grad_final: Tensor) -> Gradients:
    """Gradients of all arguments. What forward made of each chunk and the states are made again."""
    q, v, table = problem.q, problem.v, problem.table
    heads, dim, v_dim = q.shape[1], q.shape[2], v.shape[2]
    contiguous = {"memory_format": torch.contiguous_format}
    delta = problem.beta is not None
    gradients = Gradients(
        torch.empty_like(q, **contiguous),
        torch.empty_like(problem.k, **contiguous),
        torch.empty_like(v, **contiguous),
        torch.empty_like(problem.log_decay, **contiguous),
        torch.empty_like(problem.beta, **contiguous) if problem.beta is not None else q.new_empty(0),
        torch.empty_like(problem.initial_state, **contiguous),
    )
    if problem.initial_state.numel() == 0:
        return gradients
    prepared = _prepare(problem)
    num_chunks, num_rows = table.chunks.shape[0], q.shape[0]

    def wide(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=q.device)

    states = wide(num_chunks, heads, dim, v_dim)
    _scan(problem, prepared, _starts(problem, prepared), "states", states=states)

    grad_out, grad_final = grad_out.contiguous(), grad_final.contiguous()
    block_v = _scan_block_v(v_dim)
    parts = -(-v_dim // block_v)
    ends = _end_gradients(problem, prepared, grad_out, grad_final)
    query_parts, key_parts = wide(parts, num_rows, heads, dim), wide(parts, num_rows, heads, dim)
    end_parts = wide(parts, num_chunks, heads, dim)
    answer_grads = wide(parts, num_rows, heads, dim) if delta else ends
    added_grads = wide(num_rows, heads, v_dim) if delta else gradients.v
    values = torch.empty_like(prepared.values) if delta else ends
    _scan_back(
        problem,
        prepared,
        (grad_out, states, final, ends),
        (query_parts, key_parts, end_parts, answer_grads, added_grads, values, gradients.initial_state),
        local=False,
    )
    launch(
        pair_gradients_kernel,
        num_chunks * heads,
        (
            *(grad_out, q, problem.k, v, _or(problem.beta, q), prepared.sums, table.chunks),
            *(prepared.inverses, values, added_grads, answer_grads, query_parts, key_parts, end_parts),
            *(gradients.q, gradients.k, gradients.v, gradients.log_decay, gradients.beta),
        ),
        (num_rows, num_chunks, problem.scale),
        problem.constants(_scan_block_v(v_dim), 8, LEVELS=CHUNK.bit_length() - 1, PARTS=parts),
        problem.wrap,
    )
    return gradients


def _prepare(problem: Problem) -> Prepared:
    """Launches the kernels that look at each chunk by itself."""
    q, v, beta, table = problem.q, problem.v, problem.beta, problem.table
    num_rows, heads, dim = q.shape
    columns = heads if problem.log_decay.dim() == 2 else heads * dim
    sums = torch.empty(num_rows, columns, dtype=torch.float32, device=q.device)
    block = min(64, _block(columns))
    launch(
        decay_sums_kernel,
        table.chunks.shape[0] * (-(-columns // block)),
        (problem.log_decay, table.chunks, sums),
        (),
        {"STRIDE": columns, "COLUMNS": columns, "C": CHUNK, "BLOCK": block, "num_warps": 4},
        problem.wrap,
    )
    scores = q.new_empty(num_rows, heads, CHUNK)
    inverses = sums if beta is None else torch.empty(scores.shape, dtype=torch.float32, device=q.device)
    key_answers = q if beta is None else q.new_empty(q.shape)
    values = v if beta is None else v.new_empty(v.shape)
    launch(
        scores_kernel,
        table.chunks.shape[0] * heads,
        (q, problem.k, v, _or(beta, q), sums, table.chunks, scores, inverses, key_answers, values),
        (problem.scale,),
        problem.constants(_scan_block_v(v.shape[2]), 8, LEVELS=CHUNK.bit_length() - 1),
        problem.wrap,
    )
    return Prepared(sums, scores, inverses, key_answers, values)


def _starts(problem: Problem, prepared: Prepared) -> Tensor:
    """The state [segments, H, D, V] that each segment starts from."""
    if not problem.segmented:
        return problem.initial_state
    ends, decays = _per_segment(problem)
    _scan(problem, prepared, ends, "local", ends=ends, end_decays=decays)
    return _combined(problem, problem.initial_state, ends, decays, reverse=False)


def _end_gradients(problem: Problem, prepared: Prepared, grad_out: Tensor, grad_final: Tensor) -> Tensor:
    """The gradient [segments, H, D, V] of the state behind each segment's history."""
    if not problem.segmented:
        return grad_final
    local, decays = _per_segment(problem)
    _scan_back(problem, prepared, (grad_out, local, local, local), (), local=True, ends=(local, decays))
    return _combined(problem, grad_final, local, decays, reverse=True)


def _per_segment(problem: Problem) -> tuple[Tensor, Tensor]:
    """Empty states [segments, H, D, V] and decays [segments, H, D], float32."""
    state = problem.initial_state
    segments, shape = problem.table.segments.shape[0], state.shape[1:]
    states = torch.empty(segments, *shape, dtype=torch.float32, device=state.device)
    return states, torch.empty(segments, *shape[:2], dtype=torch.float32, device=state.device)


def _combined(problem: Problem, first: Tensor, local: Tensor, decays: Tensor, *, reverse: bool) -> Tensor:
    combined = torch.empty_like(local)
    batch, *shape = first.shape
    size, block = shape[0] * shape[1] * shape[2], 1024
    launch(
        combine_kernel,
        batch * (-(-size // block)),
        (first, local, decays, problem.table.segment_offsets, combined),
        (),
        {"STATE": size, "V": shape[2], "BLOCK": block, "REVERSE": reverse, "num_warps": 4},
        problem.wrap,
    )
    return combined


def _scan(problem: Problem, prepared: Prepared, starts: Tensor, mode: str, **written: Tensor) -> None:
    """Launches `forward_kernel`; `written` are the tensors that the mode writes."""
    v_dim, table = problem.v.shape[2], problem.table
    block_v = _scan_block_v(v_dim)
    outputs = [written.get(name, starts) for name in ("out", "states", "final", "ends", "end_decays")]
    launch(
        forward_kernel,
        table.segments.shape[0] * problem.q.shape[1] * (-(-v_dim // block_v)),
        (
            *(problem.q, problem.k, prepared.values, prepared.sums, prepared.scores, prepared.key_answers),
            *(starts, *table, *outputs),
        ),
        (problem.scale,),
        problem._replace(v=prepared.values).constants(block_v, _scan_warps(problem), MODE=mode),
        problem.wrap,
    )


def _scan_back(
    problem: Problem,
    prepared: Prepared,
    read: tuple[Tensor, ...],
    written: tuple[Tensor, ...],
    *,
    local: bool,
    ends: tuple[Tensor, ...] = (),
) -> None:
    """Launches `backward_kernel`."""
    v_dim, table = problem.v.shape[2], problem.table
    grad_out, states, final, end_gradients = read
    unused = prepared.sums
    block_v = _scan_block_v(v_dim)
    launch(
        backward_kernel,
        table.segments.shape[0] * problem.q.shape[1] * (-(-v_dim // block_v)),
        (
            *(grad_out, problem.q, problem.k, prepared.values, prepared.sums, prepared.scores),
            *(prepared.key_answers, states, final, end_gradients, *table),
            *(written or (unused,) * 7),
            *(ends or (unused,) * 2),
        ),
        (problem.q.shape[0], table.chunks.shape[0], problem.scale),
        problem._replace(v=prepared.values).constants(
            block_v, _scan_warps(problem), LOCAL=local, num_stages=_backward_stages(problem)
        ),
        problem.wrap,
    )


def _problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    initial_state: Tensor,
    table: ChunkTable,
    scale: float,
    wrap: Wrap | None,
    segmented: bool,
) -> Problem:
    q, k, v = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (q, k, v))
    beta = None if beta is None else beta.contiguous()
    return Problem(
        q, k, v, log_decay.contiguous(), beta, initial_state.contiguous(), table, scale, wrap, segmented
    )


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A tensor to pass where a kernel reads none."""
    return other if tensor is None else tensor


def _block(width: int) -> int:
    """The power of two, at least 16, that covers `width` columns."""
    return max(16, 1 << (int(width) - 1).bit_length())


def _scan_block_v(v_dim: int) -> int:
    """Columns of the state that a program carries."""
    return min(64, _block(v_dim))


def _scan_warps(problem: Problem) -> int:
    return 8 if problem.q.shape[2] > 64 else 4


def _backward_stages(problem: Problem) -> int:
    """Chunks that are loaded ahead: as many as shared memory holds."""
    return 1 if problem.beta is not None and problem.q.shape[2] > 64 else 2


def _traced(arguments: tuple[Any, ...], facts: tuple[Tensor, Tensor, Tensor], scale: float) -> Problem:
    """The problem of a traced graph; `facts` are lengths, offsets and numbers of targets."""
    per_segment = TRACED_SEGMENT if arguments[4] is None else 0
    table = chunk_table(*facts, arguments[0].shape[0], CHUNK, per_segment)
    return _problem(*arguments, table, scale, wrap_triton, per_segment > 0)


@traceable_op("linear_attention_triton")
def linear_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    initial_state: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    num_targets: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """`linear_attention` for traced graphs."""
    return launch_forward(
        _traced((q, k, v, log_decay, beta, initial_state), (lengths, offsets, num_targets), scale)
    )


@traceable_op("linear_attention_triton_backward")
def linear_attention_triton_backward(
    grad_out: Tensor,
    grad_final: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    initial_state: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    num_targets: Tensor,
    final: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the arguments; that of beta is empty without the delta rule."""
    problem = _traced((q, k, v, log_decay, beta, initial_state), (lengths, offsets, num_targets), scale)
    return tuple(launch_backward(problem, final, grad_out, grad_final))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:9], output[1])
    ctx.scale = inputs[9]


def _backward(ctx: Any, grad_out: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
    gradients = linear_attention_triton_backward(grad_out, grad_final, *ctx.saved_tensors, ctx.scale)
    of_beta = None if ctx.saved_tensors[4] is None else gradients[4]
    return (*gradients[:4], of_beta, gradients[5], None, None, None, None)


differentiable(linear_attention_triton, _backward, _setup)
