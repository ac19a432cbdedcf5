"""Launches the kernels of `linear_attention`: sizes, the problem as kernels read it, and the two passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recsys.ops.linear_attention.chunks import ChunkTable
from recsys.ops.linear_attention.triton_kernels import (
    combine_kernel,
    decay_sums_kernel,
    key_gradients_kernel,
    out_kernel,
    prepare_kernel,
    state_gradients_kernel,
    states_kernel,
    value_gradients_kernel,
)
from recsys.ops.runtime.launch import Wrap, is_zero, launch
from recsys.ops.runtime.triton_support import block_width, num_processors

CHUNK = 64
"""Tokens per chunk, a power of two and at least 16."""

PROGRAMS_PER_PROCESSOR = 2
"""Samples are cut into segments until this many programs carry states at the same time. With the delta rule a
segment multiplies the state by a full matrix, so there each sample is one segment."""

SHORTEST_SEGMENT = 8
"""Fewest chunks per segment, because each segment is processed twice."""

FEWEST_COLUMNS = 16
"""Fewest state columns per program, which is the fewest that a matrix product takes."""

SCAN_LAUNCH = {"num_warps": 4, "num_stages": 3}
WIDE_SCAN_LAUNCH = {"num_warps": 4, "num_stages": 1}
OUT_LAUNCH = {"num_warps": 4, "num_stages": 2}
PREPARE_LAUNCH = {"num_warps": 4, "num_stages": 1}
VALUE_GRADIENTS_LAUNCH = {"num_warps": 4, "num_stages": 1}
"""Launch parameters of the kernels; the wide ones are for float32, of which shared memory does not hold three
stages."""

COLUMNS = 64
"""Columns of keys and values that a program holds in registers at a time, if it processes them in blocks."""


class Problem(NamedTuple):
    """The tensors of a call, as the kernels read them, and the table of its chunks."""

    q: Tensor
    k: Tensor
    v: Tensor
    sums: Tensor  # [T, H, D] or [T, H], see `decay_sums`
    beta: Tensor | None
    initial_state: Tensor
    table: ChunkTable
    scale: float
    wrap: Wrap | None
    segmented: bool  # True if a sample may have more than one segment

    def _kind(self) -> dict[str, bool]:
        """Whether a head has one decay for all its channels, and whether values are replaced."""
        return {"PER_HEAD": self.sums.dim() == 2, "DELTA": self.beta is not None}

    def scan_constants(self, **others: Any) -> dict[str, Any]:
        """Compile-time constants of the kernels that carry the state."""
        blocks = {"BLOCK_V": self.scan_columns()}
        return self._sizes(block_width(self.q.shape[2])) | blocks | self._kind() | others

    def scan_launch(self) -> dict[str, int]:
        """Warps and stages of the kernels that carry the state."""
        return WIDE_SCAN_LAUNCH if self.q.dtype == torch.float32 else SCAN_LAUNCH

    def scan_columns(self) -> int:
        """Columns of the state that a program carries: fewer with the delta rule, if that occupies the GPU.

        With the delta rule, samples are not cut into segments, so a few long samples give few programs.
        """
        columns = _block_v(self.v.shape[2])
        if self.beta is None or self.wrap is not None:
            return columns
        programs = self.table.segments.shape[0] * self.v.shape[1] * -(-self.v.shape[2] // columns)
        while columns > FEWEST_COLUMNS and 2 * programs <= num_processors(self.q.device):
            columns, programs = columns // 2, 2 * programs
        return columns

    def scan_programs(self) -> int:
        """Programs of the kernels that carry the state."""
        blocks = -(-self.v.shape[2] // self.scan_columns())
        return self.table.segments.shape[0] * self.v.shape[1] * blocks

    def out_constants(self) -> dict[str, Any]:
        """Compile-time constants of `out_kernel`."""
        return self._sizes(block_width(self.q.shape[2])) | OUT_LAUNCH

    def chunk_constants(self, **others: Any) -> dict[str, Any]:
        """Compile-time constants of the kernels that process key columns in blocks."""
        levels = {"LEVELS": CHUNK.bit_length() - 1}
        return self.sizes() | self.strides("QKV") | levels | self._kind() | others

    def key_gradients_constants(self) -> dict[str, Any]:
        """Compile-time constants of `key_gradients_kernel`, with the launch that was fastest on an H200.

        With a decay a head, products take keys and queries as they are, so registers hold more columns than
        with a decay a channel, which multiplies each of them by a factor. For float32 nothing was measured;
        its sums take twice the registers. Narrow heads with a decay a channel take half the columns of
        values, since registers hold no more; they were measured with all of them.
        """
        width, is_wide = block_width(self.q.shape[2]), self.q.shape[2] > COLUMNS
        narrow, usual = COLUMNS // 2, COLUMNS
        launches = {  # columns of keys, of values, warps, stages by one decay per head, and the delta rule
            (True, False): (2 * usual, usual, 8, 1) if is_wide else (usual, usual, 4, 1),
            (True, True): (usual, usual, 8, 1),
            (False, False): (usual, usual, 8, 2) if is_wide else (narrow, narrow, 4, 1),
            (False, True): (narrow, usual, 8, 1),
        }
        keys, values, warps, stages = launches[self.sums.dim() == 2, self.beta is not None]
        if self.q.dtype == torch.float32:
            keys, values, warps, stages = narrow, usual, 8, 1
        columns = max(FEWEST_COLUMNS, min(keys, width))
        constants = self.chunk_constants(BLOCK_D=columns, num_warps=warps, num_stages=stages)
        return constants | {"BLOCK_V": min(values, constants["BLOCK_V"])}

    def sizes(self) -> dict[str, Any]:
        """Sizes of tensors and of blocks of columns."""
        return self._sizes(min(COLUMNS, block_width(self.q.shape[2])))

    def strides(self, names: str) -> dict[str, int]:
        """Strides of q, k or v."""
        tensors = {"Q": self.q, "K": self.k, "V": self.v}
        return {
            f"{kind}_{name}": int(tensors[name].stride(axis))
            for kind, axis in (("STRIDE", 0), ("HEAD", 1))
            for name in names
        }

    def _sizes(self, block_d: int) -> dict[str, Any]:
        return {
            "H": int(self.q.shape[1]),
            "D": int(self.q.shape[2]),
            "V": int(self.v.shape[2]),
            "C": CHUNK,
            "BLOCK_D": block_d,
            "BLOCK_V": _block_v(self.v.shape[2]),
            "PRECISION": "ieee" if self.q.dtype == torch.float32 else "tf32",
        }


class Prepared(NamedTuple):
    """Quantities that each chunk computes alone; the last three have no meaning without the delta rule."""

    chunk_decays: Tensor  # float32 [chunks, H, D] or [chunks, H], the sums at each chunk's last token
    scores: Tensor  # [T, H, C]
    decayed_q: Tensor  # [T, H, D]
    remaining_k: Tensor  # [T, H, D]
    inverses: Tensor  # float32 [T, H, C]
    key_answers: Tensor  # [T, H, D]
    values: Tensor  # [T, H, V], without the delta rule v itself


class Kept(NamedTuple):
    """Tensors that the forward pass keeps for the backward pass."""

    chunk_decays: Tensor  # the first six of `Prepared`
    scores: Tensor
    decayed_q: Tensor
    remaining_k: Tensor
    inverses: Tensor
    key_answers: Tensor
    states: Tensor  # [chunks, H, D, V], the state that each chunk reads
    added: Tensor  # [T, H, V], what each token adds, without the delta rule v itself


class Results(NamedTuple):
    """Results of the forward pass."""

    out: Tensor  # [T, H, V]
    final: Tensor  # float32 [B, H, D, V]
    kept: Kept


class Gradients(NamedTuple):
    """Gradients of the arguments; that of beta is empty without the delta rule."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor
    initial_state: Tensor


def chunks_per_segment(q: Tensor, v: Tensor, total_len: int, max_len: int) -> int:
    """Returns the history chunks per segment, a power of two; 0 if each sample is one segment."""
    programs = PROGRAMS_PER_PROCESSOR * num_processors(q.device)
    work = total_len // CHUNK * q.shape[1] * (-(-v.shape[2] // _block_v(v.shape[2])))
    size = max(SHORTEST_SEGMENT, 1 << max(0, (work // programs).bit_length() - 1))
    return 0 if max_len <= size * CHUNK else size


def launch_forward(problem: Problem) -> Results:
    """Launches the kernels of the forward pass."""
    v, table = problem.v, problem.table
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    kept, final = _keep(problem)
    if final.numel() > 0:
        launch(
            out_kernel,
            table.chunks.shape[0] * v.shape[1] * _blocks_v(v),
            (kept.decayed_q, kept.scores, kept.added, kept.states, table.chunks, out),
            (),
            problem.out_constants() | _strides_of_values(kept.added),
            problem.wrap,
        )
    return Results(out, final, kept)


def launch_backward(
    problem: Problem, decay_dtype: torch.dtype, kept: Kept | None, grad_out: Tensor, grad_final: Tensor
) -> Gradients:
    """Launches the kernels of the backward pass.

    Args:
        decay_dtype: type of the gradient of `log_decay`.
        kept: see `Results`; None to compute it again.
    """
    q, k, v, beta, table = problem.q, problem.k, problem.v, problem.beta, problem.table
    contiguous = {"memory_format": torch.contiguous_format}
    gradients = Gradients(
        *(torch.empty_like(tensor, **contiguous) for tensor in (q, k, v)),
        torch.empty_like(problem.sums, dtype=decay_dtype),
        torch.empty_like(beta) if beta is not None else q.new_empty(0),
        torch.empty_like(problem.initial_state, **contiguous),
    )
    if problem.initial_state.numel() == 0:
        return gradients
    kept = _keep(problem)[0] if kept is None else kept
    grad_out, grad_final = grad_out.contiguous(), grad_final.contiguous()
    ends = _end_gradients(problem, kept, grad_out, grad_final)
    state_grads = torch.empty_like(kept.states)
    added_grads = kept.added if beta is None else torch.empty_like(kept.added)
    written = (state_grads, added_grads, gradients.initial_state)
    _scan_back(problem, kept, grad_out, ends, (*written, ends, ends), local=False)
    score_grads = torch.empty_like(kept.scores)
    overlap_grads = torch.empty_like(kept.inverses) if beta is not None else score_grads
    beta_grads = torch.empty_like(beta, dtype=torch.float32) if beta is not None else score_grads
    between = (score_grads, overlap_grads, beta_grads)
    num_programs = table.chunks.shape[0] * q.shape[1]
    launch(
        value_gradients_kernel,
        num_programs,
        (
            *(grad_out, v, _or(beta, q), table.chunks, kept.scores, kept.remaining_k, kept.inverses),
            *(kept.added, added_grads, state_grads, gradients.v, *between),
        ),
        (problem.scale,),
        problem.sizes() | problem.strides("V") | {"DELTA": beta is not None} | VALUE_GRADIENTS_LAUNCH,
        problem.wrap,
    )
    launch(
        key_gradients_kernel,
        num_programs,
        (
            *(grad_out, q, k, v, _or(beta, q), problem.sums, table.chunks, kept.inverses, kept.added),
            *(added_grads, kept.states, state_grads, *between),
            *(gradients.q, gradients.k, gradients.log_decay, gradients.beta),
        ),
        (problem.scale,),
        problem.key_gradients_constants(),
        problem.wrap,
    )
    return gradients


def decay_sums(log_decay: Tensor, table: ChunkTable, dtype: torch.dtype, wrap: Wrap | None) -> Tensor:
    """Sums `log_decay` in base 2 from each chunk's first token on, in twice the bits of `dtype` of q."""
    log_decay = log_decay.contiguous()
    sums_dtype = torch.float64 if dtype == torch.float32 else torch.float32
    sums = torch.empty_like(log_decay, dtype=sums_dtype)
    columns = log_decay.shape[1:].numel()
    if is_zero(sums.numel()):
        return sums
    block = min(64, block_width(columns))
    launch(
        decay_sums_kernel,
        table.chunks.shape[0] * (-(-columns // block)),
        (log_decay, table.chunks, sums),
        (),
        {"STRIDE": columns, "COLUMNS": columns, "C": CHUNK, "BLOCK": block, "num_warps": 4},
        wrap,
    )
    return sums


def _prepare(problem: Problem) -> Prepared:
    """Launches the kernels that work on each chunk alone, before there are states."""
    q, v, beta, table = problem.q, problem.v, problem.beta, problem.table
    num_rows, heads, dim = q.shape
    num_chunks = table.chunks.shape[0]

    constants = problem.chunk_constants(**PREPARE_LAUNCH)

    def wide(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=q.device)

    prepared = Prepared(
        chunk_decays=wide(num_chunks, *problem.sums.shape[1:]),
        scores=q.new_empty(num_rows, heads, CHUNK),
        decayed_q=q.new_empty(q.shape),
        remaining_k=q.new_empty(q.shape),
        inverses=problem.sums if beta is None else wide(num_rows, heads, CHUNK),
        key_answers=q if beta is None else q.new_empty(q.shape),
        values=v if beta is None else v.new_empty(v.shape),
    )
    if problem.initial_state.numel() == 0:
        return prepared
    launch(
        prepare_kernel,
        num_chunks * heads,
        (
            *(q, problem.k, v, _or(beta, q), problem.sums, table.chunks),
            *(prepared.scores, prepared.decayed_q, prepared.remaining_k, prepared.chunk_decays),
            *(prepared.inverses, prepared.key_answers, prepared.values),
        ),
        (problem.scale,),
        constants,
        problem.wrap,
    )
    return prepared


def _starts(problem: Problem, prepared: Prepared) -> Tensor:
    """Returns the state [segments, H, D, V] that each segment starts from."""
    if not problem.segmented:
        return problem.initial_state
    ends, decays = _per_segment(problem)
    _scan(problem, prepared, ends, (ends, ends, ends, ends, decays), local=True)
    return _combined(problem, problem.initial_state, ends, decays, reverse=False)


def _keep(problem: Problem) -> tuple[Kept, Tensor]:
    """Launches the kernels of the forward pass before its output; returns also the final state."""
    (heads, dim), v_dim = problem.q.shape[1:], problem.v.shape[2]
    final = torch.empty_like(problem.initial_state, dtype=torch.float32)
    prepared = _prepare(problem)
    states = problem.q.new_empty(problem.table.chunks.shape[0], heads, dim, v_dim)
    added = problem.v if problem.beta is None else torch.empty_like(prepared.values)
    if final.numel() > 0:
        starts = _starts(problem, prepared)
        _scan(problem, prepared, starts, (states, final, added, final, final), local=False)
    return Kept(*prepared[:6], states, added), final


def _end_gradients(problem: Problem, kept: Kept, grad_out: Tensor, grad_final: Tensor) -> Tensor:
    """Returns the gradient [segments, H, D, V] of the state after each segment's history."""
    if not problem.segmented:
        return grad_final
    local, decays = _per_segment(problem)
    _scan_back(problem, kept, grad_out, local, (local, local, local, local, decays), local=True)
    return _combined(problem, grad_final, local, decays, reverse=True)


def _per_segment(problem: Problem) -> tuple[Tensor, Tensor]:
    """Allocates states [segments, H, D, V] and decays [segments, H, D], float32, uninitialized."""
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


def _scan(
    problem: Problem, prepared: Prepared, starts: Tensor, written: tuple[Tensor, ...], *, local: bool
) -> None:
    """Launches `states_kernel`."""
    values, table = prepared.values, problem.table
    launch(
        states_kernel,
        problem.scan_programs(),
        (
            *(prepared.remaining_k, values, prepared.key_answers, prepared.chunk_decays, starts, *table),
            *written,
        ),
        (),
        problem.scan_constants(LOCAL=local, **_strides_of_values(values), **problem.scan_launch()),
        problem.wrap,
    )


def _scan_back(
    problem: Problem,
    kept: Kept,
    grad_out: Tensor,
    ends: Tensor,
    written: tuple[Tensor, ...],
    *,
    local: bool,
) -> None:
    """Launches `state_gradients_kernel`."""
    table = problem.table
    launch(
        state_gradients_kernel,
        problem.scan_programs(),
        (
            *(grad_out, kept.decayed_q, kept.remaining_k, kept.scores, kept.key_answers),
            *(kept.chunk_decays, ends, *table, *written),
        ),
        (),
        problem.scan_constants(LOCAL=local, **problem.scan_launch()),
        problem.wrap,
    )


def problem_of(tensors: Sequence[Tensor | None], *facts: Any) -> Problem:
    """Returns the problem with these tensors, its first six fields, in a form that kernels read."""
    q, k, v, sums, beta, initial_state = tensors
    q, k, v = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (q, k, v))
    beta = None if beta is None else beta.contiguous()
    return Problem(q, k, v, sums, beta, initial_state.contiguous(), *facts)


def _strides_of_values(values: Tensor) -> dict[str, int]:
    return {"STRIDE_V": int(values.stride(0)), "HEAD_V": int(values.stride(1))}


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Returns a tensor to pass where a kernel reads none."""
    return other if tensor is None else tensor


def _block_v(v_dim: int) -> int:
    """Returns the number of value columns per program."""
    return min(COLUMNS, block_width(v_dim))


def _blocks_v(values: Tensor) -> int:
    return -(-values.shape[2] // _block_v(values.shape[2]))
