"""Launches of the Hopper kernels of `linear_logp`: sizes, parts. What is left for each row is Triton's, and
so are the gradients of narrow rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from recsys.ops.linear_logp import launch, row_launch, triton_ops
from recsys.ops.linear_logp.hopper_kernels import STRIP, forward_kernel, gradient_kernel
from recsys.ops.linear_logp.hopper_wide import CHUNK, slopes_kernel, sums_kernel
from recsys.ops.linear_logp.recompute import Found, Gradients, Operands, Parts, Upstream, Wanted
from recsys.ops.runtime.hopper_launch import Boxes, start, with_loadable_rows

WARPS = 4
"""Of a warp group."""


class Sizes(NamedTuple):
    """Of a kernel for one width."""

    others: int  # BLOCK_N
    stages: int
    strips: int  # of 64 rows a tile, a warp group each
    computing_registers: int
    loading_registers: int = 24

    @property
    def rows(self) -> int:
        """Of a tile."""
        return STRIP.value * self.strips


FORWARD = {64: Sizes(128, 6, 4, 120), 128: Sizes(128, 4, 4, 120), 256: Sizes(64, 4, 2, 240)}
"""By width."""

OF_HIDDEN = {128: Sizes(128, 4, 2, 240), 256: Sizes(64, 4, 2, 240)}

OF_WEIGHT = dict(OF_HIDDEN)

NARROW = 64
"""Up to this width Triton's gradients are faster: what there is beside the products is most of the work, and
plain programs, several a processor, share it out better."""

PIECE = 8
"""Columns of 16 bytes."""

WIDE_FROM = 257
"""Columns from which on gradients of scores are written, a section of the candidates at a time."""

WIDE_SUMS = Sizes(128, 5, 2, 240)
WIDE_SLOPES = Sizes(128, 3, 2, 240)
"""Buffers for 64 columns of the weight each."""

SECTION_NUMBERS = 1 << 25
"""Of the gradients of scores that are written at a time: 64 MiB."""

LEAST_SECTION = 512
"""Candidates."""


def forward(operands: Operands) -> Parts:
    """The arguments have been validated and are not empty; no bias, no ids."""
    operands = launch.prepared(with_own_rows(operands))
    return row_launch.parts_of_sums(operands, *launch_sums(operands))


def whole_forward(operands: Operands, ignore_index: int | None) -> Found:
    """The same and what is made of it."""
    operands = launch.prepared(with_own_rows(operands))
    return row_launch.finished(operands, *launch_sums(operands), ignore_index)


def with_own_rows(operands: Operands) -> Operands:
    """The operands with rows that a tensor map can describe, which are of unit length where they count so.

    What is in the way is mended in copies, which live as long as a pass: rows of whole pieces of 16 bytes,
    the rest zeros; multiplied by the inverse norms and rounded.
    """
    hidden, weight, *_, hidden_norms, weight_norms = operands
    if hidden_norms is None and hidden.shape[1] % PIECE == 0:
        return operands
    hidden, weight = _copied(hidden, hidden_norms), _copied(weight, weight_norms)
    return operands._replace(hidden=hidden, weight=weight, hidden_norms=None, weight_norms=None)


def _copied(rows: Tensor, norms: Tensor | None) -> Tensor:
    count, width = rows.shape
    whole = rows.new_empty(count, -(-width // PIECE) * PIECE)
    whole[:, width:] = 0
    if norms is None:
        whole[:, :width] = rows
    else:
        torch.mul(rows, norms[:, None], out=whole[:, :width])
    return whole


def of_given_rows(made: Gradients, operands: Operands) -> Gradients:
    """`made` for `with_own_rows(operands)`, as gradients of `operands`."""
    return made._replace(
        hidden=_of_given(made.hidden, operands.hidden, operands.hidden_norms),
        weight=_of_given(made.weight, operands.weight, operands.weight_norms),
    )


def _of_given(grad: Tensor | None, rows: Tensor, norms: Tensor | None) -> Tensor | None:
    if grad is None or norms is None:
        return grad if grad is None else grad[:, : rows.shape[1]]
    return row_launch.project(grad, rows.contiguous(), norms)


def launch_sums(operands: Operands) -> tuple[Tensor, Tensor]:
    """[parts, N] each: maximum and sum over parts of the candidates."""
    hidden, weight, _, scale, *_ = operands
    width = width_of(operands)
    kernel, sizes = (forward_kernel, FORWARD[width]) if width < WIDE_FROM else (sums_kernel, WIDE_SUMS)
    cut = cut_for(hidden, weight, sizes, launch.MAX_PARTS)
    maxima, totals = (scale.new_empty(cut.parts, hidden.shape[0]) for _ in range(2))
    start(
        kernel,
        (hidden.dtype, width, sizes),
        cut.programs,
        boxes(hidden, weight, sizes, width if width < WIDE_FROM else CHUNK.value),
        (scale, maxima, totals),
        cut.numbers,
        lambda: constants_of(sizes, width),
    )
    return maxima, totals


def backward(operands: Operands, upstream: Upstream, wanted: Wanted) -> Gradients:
    """As `triton_ops.launch_backward`."""
    own = launch.prepared(with_own_rows(operands))
    if width_of(own) <= NARROW:
        made = triton_ops.launch_backward(own, upstream, wanted)
    else:
        made = gradients(own, *row_launch.upstream_by_torch(own, upstream, sides(own)), wanted)
    return of_given_rows(made, operands)


def whole_backward(
    operands: Operands, found: Found, grad_logp: Tensor | None, grad_lse: Tensor | None, wanted: Wanted
) -> Gradients:
    """As `triton_ops.whole_backward`."""
    own = launch.prepared(with_own_rows(operands))
    if width_of(own) <= NARROW:
        made = triton_ops.whole_backward(own, found, grad_logp, grad_lse, wanted)
    else:
        by_row = row_launch.upstream_of(own, found, (grad_logp, grad_lse), sides(own))
        made = gradients(own, *by_row, wanted)
    return of_given_rows(made, operands)


def sides(operands: Operands) -> tuple[row_launch.Side, row_launch.Side]:
    """How the two gradient kernels are cut into tiles."""
    width = width_of(operands)
    if is_wide(operands):
        return row_launch.sides_of(operands, WIDE_SLOPES, WIDE_SLOPES)
    return row_launch.sides_of(operands, OF_HIDDEN[width], OF_WEIGHT[width])


def is_wide(operands: Operands) -> bool:
    """Whether gradients of scores are to be written."""
    return width_of(operands) >= WIDE_FROM


def gradients(
    operands: Operands, vectors: Tensor, rows: Tensor, marks: row_launch.Marks, wanted: Wanted
) -> Gradients:
    """The operands `prepared`; the others as in `triton_rows.upstream_kernel`."""
    if is_wide(operands):
        return wide_gradients(operands, vectors, rows, marks.hidden, wanted)
    grad_hidden = grad_weight = grad_scale = None
    if wanted.hidden or wanted.scale:
        given = (operands, vectors, rows, marks.hidden)
        grad_hidden, grad_scale = _launch_side(*given, of_weight=False, with_scale=wanted.scale)
    if wanted.weight:
        grad_weight, _ = _launch_side(operands, vectors, rows, marks.weight, of_weight=True)
    return Gradients(grad_hidden if wanted.hidden else None, grad_weight, None, grad_scale)


def _launch_side(
    operands: Operands,
    vectors: Tensor,
    rows: Tensor,
    marks: Tensor,
    *,
    of_weight: bool,
    with_scale: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of hidden, float32, or of the weight, in its type; of the scale."""
    hidden, weight, _, scale, target, *_ = operands
    own, other = (weight, hidden) if of_weight else (hidden, weight)
    num_own, columns = own.shape
    width = width_of(operands)
    sizes = (OF_WEIGHT if of_weight else OF_HIDDEN)[width]
    most = min(launch.MAX_PARTS, 1 + launch.PART_NUMBERS // (num_own * columns))
    cut = cut_for(own, other, sizes, most)
    dtype = own.dtype if of_weight and cut.parts == 1 else scale.dtype
    grad = own.new_empty(cut.parts, num_own, columns, dtype=dtype)
    grad_scale = scale.new_empty(cut.parts, num_own) if with_scale else scale
    kind = {"OF_WEIGHT": of_weight, "HAS_TARGET": target is not None, "WITH_SCALE": with_scale}
    start(
        gradient_kernel,
        (hidden.dtype, width, sizes, dtype, *kind.values()),
        cut.programs,
        boxes(own, other, sizes, width),
        (scale, *vectors.unbind(0), rows, marks, grad, grad_scale),
        (*cut.numbers, columns),
        lambda: constants_of(sizes, width) | kind,
    )
    summed = grad.sum(0) if cut.parts > 1 else grad[0]
    if of_weight:
        summed = summed.to(own.dtype)
    return summed, grad_scale.sum().reshape(1) if with_scale else None


def wide_gradients(
    operands: Operands, vectors: Tensor, rows: Tensor, marks: Tensor, wanted: Wanted
) -> Gradients:
    """As `gradients`: those of the scores of a section of the candidates, then two library products."""
    hidden, weight, _, scale, *_ = operands
    num_candidates = weight.shape[0]
    size = section_of(*hidden.shape[:1])
    room = hidden.new_empty(hidden.shape[0], min(size, -(-num_candidates // 8) * 8))
    grad_hidden = scale.new_zeros(hidden.shape) if wanted.hidden else None
    grad_weight = torch.empty_like(weight) if wanted.weight else None
    grad_scale = scale.new_zeros(1) if wanted.scale else None
    for first in range(0, num_candidates, size):
        section = slice(first, min(first + size, num_candidates))
        slopes = room[:, : section.stop - first]
        share = _launch_slopes(operands, slopes, vectors, rows, marks, section, with_scale=wanted.scale)
        if grad_hidden is not None:
            grad_hidden += torch.mm(slopes, weight[section], out_dtype=scale.dtype)
        if grad_weight is not None:
            # Not rounded before it is summed, whatever PyTorch's settings allow the library to do.
            grad_weight[section] = torch.mm(slopes.t(), hidden, out_dtype=scale.dtype)
        if grad_scale is not None:
            grad_scale += share.sum()
    return Gradients(grad_hidden, grad_weight, None, grad_scale)


def section_of(num_rows: int) -> int:
    """How many candidates are looked at together: whole blocks."""
    block = WIDE_SLOPES.others
    return max(LEAST_SECTION, SECTION_NUMBERS // num_rows // block * block)


def _launch_slopes(
    operands: Operands,
    slopes: Tensor,
    vectors: Tensor,
    rows: Tensor,
    marks: Tensor,
    section: slice,
    *,
    with_scale: bool,
) -> Tensor:
    """Writes `slopes`; each row's share in the gradient of the scale, [parts, N], if that is wanted."""
    hidden, weight, _, scale, target, *_ = operands
    sizes, others = WIDE_SLOPES, weight[section]
    cut = cut_for(hidden, others, sizes, launch.MAX_PARTS)
    grad_scale = scale.new_empty(cut.parts, hidden.shape[0]) if with_scale else scale
    kind = {"HAS_TARGET": target is not None, "WITH_SCALE": with_scale}
    width = width_of(operands)
    block = sizes.others
    start(
        slopes_kernel,
        (hidden.dtype, width, sizes, *kind.values()),
        cut.programs,
        (*boxes(hidden, others, sizes, CHUNK.value), Boxes(slopes.unsqueeze(1), STRIP.value, block)),
        (scale, *vectors.unbind(0), rows, marks, grad_scale),
        (*cut.numbers, section.start // block, -(-weight.shape[0] // block)),
        lambda: constants_of(sizes, width) | kind,
    )
    return grad_scale


class Cut(NamedTuple):
    """How a launch is cut into units."""

    numbers: tuple[int, int, int, int, int]  # `work` of the kernels
    parts: int
    programs: int


def cut_for(own: Tensor, other: Tensor, sizes: Sizes, most: int) -> Cut:
    """One program a processor; as many parts as let them work to the end."""
    processors = launch.processors(own.device)
    tiles, blocks = -(-own.shape[0] // sizes.rows), -(-other.shape[0] // sizes.others)
    parts, per_part = launch.balanced(tiles, blocks, processors, min(most, blocks))
    units = tiles * parts
    return Cut((own.shape[0], other.shape[0], tiles, units, per_part), parts, min(units, processors))


def boxes(own: Tensor, other: Tensor, sizes: Sizes, width: int) -> tuple[Boxes, Boxes]:
    """What the descriptors of two matrices show at a time."""
    own, other = (with_loadable_rows(matrix.unsqueeze(1)) for matrix in (own, other))
    return Boxes(own, STRIP.value, width), Boxes(other, sizes.others, width)


def constants_of(sizes: Sizes, width: int) -> dict[str, Any]:
    """What the kernels are compiled for, by the names of their parameters."""
    columns = {"BLOCK_D": width} if width < WIDE_FROM else {"CHUNKS": width // CHUNK.value}
    return {
        **columns,
        "BLOCK_N": sizes.others,
        "STAGES": sizes.stages,
        "STRIPS": sizes.strips,
        "COMPUTING_REGISTERS": sizes.computing_registers,
        "LOADING_REGISTERS": sizes.loading_registers,
        "num_warps": WARPS,
    }


def width_of(operands: Operands) -> int:
    """Of a block of whole rows."""
    columns = operands.hidden.shape[1]
    if columns >= WIDE_FROM:
        return -(-columns // CHUNK.value) * CHUNK.value
    return max(64, launch.padded_width(columns))
