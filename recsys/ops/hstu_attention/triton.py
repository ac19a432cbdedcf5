"""The Triton backend of `hstu_attention`: launches of its kernels, an autograd function, and library ops for
graphs.

`triton_kernels` holds the kernels, `bias` those for a relative bias; `work_list` lists the tiles that they
work on. The launches use only what a compiler can trace: `wrap` surrounds each kernel, as the identity in
eager mode and as `torch.library.wrap_triton` in a graph. Eager dispatch through the library costs about 60 us
per call, so eager mode calls `HstuAttention` directly. In a traced graph `recsys::hstu_attention_triton` is
one node, whose kernels a compiler sees and embeds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import wrap_triton

from recsys.ops.hstu_attention.bias import packed as packed_bias
from recsys.ops.hstu_attention.bias.kernels import bias_arguments
from recsys.ops.hstu_attention.bias.packed import (
    Sums,
    bias_constants,
    finished,
    launch_with_declared_memory,
    packed_arguments,
    packed_tables,
    tables_constants,
    zero_sums,
)
from recsys.ops.hstu_attention.bias.table_kernels import diagonal_work, diagonals_kernel, others_kernel
from recsys.ops.hstu_attention.block_sizes import Blocks, blocks_for, is_roomy, keys_kernels
from recsys.ops.hstu_attention.mask_forms import rule_of, rules
from recsys.ops.hstu_attention.problem import (
    FLAT_TABLES,
    NUM_FLAT_TENSORS,
    FlatProblem,
    Gradients,
    Problem,
    flattened,
)
from recsys.ops.hstu_attention.triton_kernels import forward_kernel, keys_kernel, rows_kernel
from recsys.ops.hstu_attention.work_list import key_work, row_work
from recsys.ops.relative_bias import RelativeBias
from recsys.ops.runtime.descriptors import Boxes, is_loadable, ragged_descriptor
from recsys.ops.runtime.launch import Wrap, is_zero, launch_specialized, unwrapped
from recsys.ops.runtime.registration import differentiable, flat_signature, saving, traceable_op
from recsys.ops.runtime.triton_support import block_width, load, missing_for_hopper, num_processors

TABLES = ("tables",)
"""Key of the `PackedTables` in `Problem.shared`."""

AT_ONCE = "recsys.ops.hstu_attention.bias.hopper_kernel"
"""The module that computes all gradients with a bias in a single Gluon kernel."""

PROGRAMS_PER_PROCESSOR = 2
"""Programs per multiprocessor for the kernels that sum gradients of tables; each program needs memory of its
own."""


def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """Run the kernels: scores, sums and bias are float32; work and memory grow with the tokens present, not
    with padding."""
    if torch.compiler.is_compiling():
        return call_op(q, k, v, problem)
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if problem.bias is None and not needs_grad:
        return forward(q, k, v, problem)
    return HstuAttention.apply(q, k, v, *problem.tables, problem)


def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem, wrap: Wrap = unwrapped) -> Tensor:
    """Compute `hstu_attention` [T, H, V]; the arguments have been validated."""
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    if is_zero(q.shape[0]):
        return out
    q, k, v = map(with_dense_rows, (q, k, v))
    packed = _is_packed("forward", q, v, problem, wrap)
    described = (packed or problem.bias is None) and can_describe(wrap, q, k, v)
    kernel = "described" if described else "forward"
    blocks = blocks_for(f"packed_{kernel}" if packed else kernel, q, v, problem)
    items = row_work(problem.mask, problem.layout, blocks.rows, blocks.keys)
    num_heads = q.shape[1]
    compiled_for = {
        "DESCRIBED": described,
        **bias_constants(packed, rows_first=True),
        **constants(problem, q, v, blocks),
    }
    arguments = [
        *operands(described, (q, blocks.rows), (k, blocks.keys), (v, blocks.keys)),
        *(out, items, items.shape[0], num_heads, *strides(q, k, v), *scalars(problem)),
        *bias_arguments_of(problem, items, blocks, wrap, packed),
    ]
    _launch(forward_kernel, items.shape[0] * num_heads, arguments, compiled_for, wrap)
    return out


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    *,
    tables: bool,
    wrap: Wrap = unwrapped,
) -> Gradients:
    """Return all gradients, including those of the bias tables if `tables`."""
    contiguous = (torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (q, k, v))
    out, bias = Gradients(*contiguous), problem.bias if tables else None
    if is_zero(q.shape[0]):
        if bias is None:
            return out
        return out._replace(
            position_table=torch.zeros_like(bias.position_table), time_table=torch.zeros_like(bias.time_table)
        )
    given = _Given(*map(with_dense_rows, (q, k, v, grad_out)))
    fused = bias is not None and not problem.deterministic and _is_packed("sums", q, v, problem, wrap)
    if bias is not None and fused and can_describe(wrap, *given) and not missing_for_hopper():
        return load(AT_ONCE).backward(*given, out, problem, bias)
    sums = zero_sums(q, problem.layout.max_len, bias) if bias is not None and fused else None
    for kernel in keys_kernels(q.dtype, int(q.shape[2]), int(v.shape[2]), problem.bias is not None):
        _launch_keys(kernel, given, out, problem, sums, wrap)
    _launch_rows(given, out, problem, wrap)
    if bias is None:
        return out
    if sums is not None:
        position_table, time_table = finished(sums, problem.scale_len, bias)
    else:
        position_table, time_table = _table_gradients(given, problem, bias, wrap)
    return out._replace(position_table=position_table, time_table=time_table)


class _Given(NamedTuple):
    """The tensors that the kernels of backward read."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor


def _launch_keys(
    kernel: str, given: _Given, out: Gradients, problem: Problem, sums: Sums | None, wrap: Wrap
) -> None:
    """Compute dK and dV, or one of the two (see `keys_kernels`), and add to `sums` unless it is None."""
    q, k, v, grad_out = given
    packed = _is_packed(kernel, q, v, problem, wrap)
    sizes = "packed_sums" if sums is not None else f"packed_{kernel}" if packed else kernel
    blocks = blocks_for(sizes, q, v, problem)
    items = key_work(problem.mask, problem.layout, blocks.keys, blocks.rows)
    num_heads = q.shape[1]
    described = packed and can_describe(wrap, q, k, v, grad_out)
    compiled_for = {
        "GRAD_K": kernel != "grad_v",
        "GRAD_V": kernel != "grad_k",
        "DESCRIBED": described,
        **bias_constants(packed, rows_first=False, sums=sums is not None),
        **tables_constants(sums),
        **constants(problem, q, v, blocks),
    }
    shown = (q, blocks.rows), (k, blocks.keys), (v, blocks.keys), (grad_out, blocks.rows)
    arguments = [
        *operands(described, *shown),
        *(out.k, out.v, items, items.shape[0], num_heads, *strides(*given), *scalars(problem)),
        *bias_arguments_of(problem, items, blocks, wrap, packed, rows_first=False),
        *((items, items, 1) if sums is None else (*sums, sums.by_bucket.shape[0])),
    ]
    _launch(keys_kernel, items.shape[0] * num_heads, arguments, compiled_for, wrap)


def _launch_rows(given: _Given, out: Gradients, problem: Problem, wrap: Wrap) -> None:
    """Compute dQ."""
    q, k, v, grad_out = given
    packed = _is_packed("rows", q, v, problem, wrap)
    described = packed and can_describe(wrap, q, k, v, grad_out)
    kernel = "packed_rows" if described else "packed_any_rows" if packed else "rows"
    blocks = blocks_for(kernel, q, v, problem)
    items = row_work(problem.mask, problem.layout, blocks.rows, blocks.keys)
    num_heads = q.shape[1]
    compiled_for = {
        "DESCRIBED": described,
        **bias_constants(packed, rows_first=True),
        **constants(problem, q, v, blocks),
    }
    shown = (q, blocks.rows), (k, blocks.keys), (v, blocks.keys), (grad_out, blocks.rows)
    arguments = [
        *operands(described, *shown),
        *(out.q, items, items.shape[0], num_heads, *strides(*given), *scalars(problem)),
        *bias_arguments_of(problem, items, blocks, wrap, packed),
    ]
    _launch(rows_kernel, items.shape[0] * num_heads, arguments, compiled_for, wrap)


def _launch(
    kernel: Any,
    programs: int,
    arguments: list[Boxes | Tensor | int | float],
    compiled_for: dict[str, Any],
    wrap: Wrap,
) -> None:
    """Start `kernel[(programs,)](*arguments, **compiled_for)`, in eager mode through our own faster launcher.

    Kernels with a bias that is not packed go through Triton's launcher; ours is untested with them.
    """
    if compiled_for["BIAS_TEXT"] != "":
        launch_with_declared_memory(kernel, programs, arguments, compiled_for, ragged_descriptor)
    elif wrap is unwrapped and not compiled_for["BIASED"]:
        launch_specialized(kernel, programs, arguments, compiled_for, ragged_descriptor)
    else:
        wrap(kernel)[(programs,)](*arguments, **compiled_for)


def _table_gradients(
    given: _Given, problem: Problem, bias: RelativeBias, wrap: Wrap
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the position table and of the time table."""
    q, k, v, grad_out = given
    blocks = blocks_for("tables", q, v, problem)
    num_heads = q.shape[1]
    workers = max(1, PROGRAMS_PER_PROCESSOR * num_processors(q.device) // num_heads)
    items = row_work(problem.mask, problem.layout, blocks.rows, blocks.keys)
    diagonals = diagonal_work(problem.mask, problem.layout, blocks.rows, blocks.keys, workers)
    lines = -(-bias.position_table.shape[-1] // blocks.keys)
    buckets = int(bias.time_table.shape[-1])
    positions = q.new_zeros(workers, num_heads, (lines + 2) * blocks.keys, dtype=torch.float32)
    times = q.new_zeros(workers, num_heads, buckets, blocks.rows * 2, dtype=torch.float32)
    shared = (
        *strides(q, k, v, grad_out),
        *scalars(problem),
        *bias_arguments_of(problem, items, blocks, wrap),
        positions,
        times,
        lines,
    )
    compiled_for = {"BUCKETS": buckets, **constants(problem, q, v, blocks)}
    grid = (workers * num_heads,)
    wrap(diagonals_kernel)[grid](
        q, k, v, grad_out, *diagonals, diagonals.ends.shape[0], num_heads, *shared, **compiled_for
    )
    within_a_tile = 0 if problem.mask.contextual_reads_history else blocks.rows
    if problem.num_contextual > within_a_tile or problem.layout.total_targets > 0:
        wrap(others_kernel)[grid](
            q, k, v, grad_out, items, items.shape[0], num_heads, *shared, **compiled_for
        )
    by_position = positions.sum(0)
    by_position = _fold(by_position[:, blocks.keys :], by_position[:, : blocks.keys], bias)
    scale = 0.5 / problem.scale_len
    return (
        _like_table(by_position * scale, bias.position_table),
        _like_table(times.sum((0, 3)) * scale, bias.time_table),
    )


def _is_packed(kernel: str, q: Tensor, v: Tensor, problem: Problem, wrap: Wrap) -> bool:
    """Return True if the bias is added by inline assembly; never in graphs."""
    return wrap is unwrapped and packed_bias.is_packed(kernel, q, v, problem.bias)


def bias_arguments_of(
    problem: Problem,
    items: Tensor,
    blocks: Blocks,
    wrap: Wrap,
    packed: bool = False,
    rows_first: bool = True,
    section: int | None = None,
) -> list[Tensor | int]:
    """Return the arguments from `position_table` to `num_buckets`; `section` is the one that `items` were
    built with."""
    layout, bias = problem.layout, problem.bias
    key = (packed, blocks.rows, blocks.keys, packed and rows_first, section)
    arguments = problem.shared.get(key)
    if arguments is None:
        if packed and bias is not None:
            tables = problem.shared.get(TABLES)
            if tables is None:
                tables = problem.shared[TABLES] = packed_tables(bias, layout)
            order = (problem.mask, rows_first, section)
            arguments = packed_arguments(bias, tables, layout, items, order)
        else:
            arguments = bias_arguments(
                bias, layout, layout.max_len, items, blocks.rows, blocks.keys, wrap, shared=wrap is unwrapped
            )
        problem.shared[key] = arguments
    return arguments


def _fold(distances: Tensor, negative: Tensor, bias: RelativeBias) -> Tensor:
    """Fold sums by distance [H, > P] to [H, P]: distances outside the table are added to its first and last
    entries."""
    last = bias.position_table.shape[-1] - 1
    sums = distances[:, : last + 1].clone()
    sums[:, 0] += negative.sum(1)
    sums[:, last] += distances[:, last + 1 :].sum(1)
    return sums


def _like_table(sums: Tensor, table: Tensor) -> Tensor:
    """Convert [H, buckets] to the table's shape and dtype; a table without heads gets the sum over heads."""
    return (sums if table.dim() == 2 else sums.sum(0)).to(table.dtype)


def with_dense_rows(tensor: Tensor) -> Tensor:
    """Return a tensor whose last dimension has stride 1; the kernels accept any other strides."""
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def can_describe(wrap: Wrap, *tensors: Tensor) -> bool:
    """Return True if the copy engine of Hopper and later can fetch blocks of all tensors [T, H, D].

    It needs rows with 16-byte strides, heads side by side within a row, and no columns to cut off. Graphs
    would have to create descriptors, so they go without. Every GPU with enough shared memory has a copy
    engine.
    """
    device = tensors[0].device
    if wrap is not unwrapped or device.type != "cuda":
        return False
    return is_roomy(device) and all(map(_is_describable, tensors))


def _is_describable(tensor: Tensor) -> bool:
    dim = tensor.shape[2]
    has_all_columns = dim == block_width(dim, least=64) and tensor.element_size() == 2
    return has_all_columns and is_loadable(tensor)


def operands(described: bool, *tensors: tuple[Tensor, int]) -> list[Tensor | Boxes]:
    """Return the tensors themselves or, if `described`, boxes of the given number of rows for descriptors."""
    return [Boxes(tensor, rows, tensor.shape[2]) if described else tensor for tensor, rows in tensors]


def strides(*tensors: Tensor) -> list[int]:
    """Return the strides of rows and of heads of each tensor, in elements."""
    return [tensor.stride(dim) for tensor in tensors for dim in (0, 1)]


def scalars(problem: Problem) -> list[int | float]:
    """Return the numbers of a problem, from `alpha` to `group_size`."""
    return [problem.alpha, 1.0 / problem.scale_len, *rule_of(problem.mask, problem.num_contextual)]


def constants(problem: Problem, q: Tensor, v: Tensor, blocks: Blocks) -> dict[str, Any]:
    """Return the compile-time constants of the kernels by the names of their parameters."""
    return {
        "D": int(q.shape[2]),
        "V": int(v.shape[2]),
        "BLOCK_M": blocks.rows,
        "BLOCK_N": blocks.keys,
        "BLOCK_D": block_width(q.shape[2]),
        "BLOCK_V": block_width(v.shape[2]),
        **rules(problem.mask),
        "BIASED": problem.bias is not None,
        "FAST": q.device.type == "cuda" and q.dtype != torch.float32,
        "PRECISION": "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32",
        "num_warps": blocks.num_warps,
        "num_stages": blocks.num_stages,
        **({} if blocks.max_registers is None else {"maxnreg": blocks.max_registers}),
    }


class HstuAttention(torch.autograd.Function):
    """Autograd function, called as `apply(q, k, v, position_table, time_table, problem)`.

    The tables are those of the problem's bias, or None; they are separate parameters so that they get
    gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position_table: Tensor | None,
        time_table: Tensor | None,
        problem: Problem,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.problem = problem
        return forward(q, k, v, problem)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        tables = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
        gradients = backward(grad_out, *ctx.saved_tensors, ctx.problem, tables=tables)
        return (*gradients, None)


def call_op(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """Call the library op, for traced graphs."""
    return hstu_attention_triton(q, k, v, *flattened(problem))


@traceable_op("hstu_attention_triton")
@flat_signature(dict.fromkeys(("q", "k", "v"), Tensor), FlatProblem, returns=Tensor)
def hstu_attention_triton(q: Tensor, k: Tensor, v: Tensor, *flat: Any) -> Tensor:
    """Compute `hstu_attention` for a flattened problem."""
    return forward(q, k, v, FlatProblem(*flat).rebuilt(q.shape[0]), wrap_triton)


@traceable_op("hstu_attention_triton_backward")
@flat_signature(dict.fromkeys(("grad_out", "q", "k", "v"), Tensor), FlatProblem, returns=list[Tensor])
def hstu_attention_triton_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *flat: Any
) -> list[Tensor]:
    """Compute the gradients of q, k and v, and of both tables if there are any."""
    problem = FlatProblem(*flat).rebuilt(q.shape[0])
    gradients = backward(grad_out, q, k, v, problem, tables=problem.bias is not None, wrap=wrap_triton)
    return [gradient for gradient in gradients if gradient is not None]


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    gradients = hstu_attention_triton_backward(grad_out, *ctx.saved_tensors, *ctx.rest)
    flat: list[Tensor | None] = [None] * (NUM_FLAT_TENSORS + len(ctx.rest))
    flat[FLAT_TABLES : FLAT_TABLES + 2] = gradients[3:] or (None, None)
    return (*gradients[:3], *flat)


differentiable(hstu_attention_triton, _backward, saving(3 + NUM_FLAT_TENSORS))
