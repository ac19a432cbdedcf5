"""Implements `linear_attention` in plain PyTorch, chunk by chunk, on any device and in any float dtype.

Samples are padded and processed in chunks: the state contributes one product, and the tokens of a chunk
contribute a table of all pairs, in which no decay is divided by another. Backward computes each chunk again.
In a compiled graph everything is one node for any number of chunks; an exported graph, which must not need
Python, contains the loop over chunks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.runtime.dispatch import SUPPORTED, Support, is_exporting
from recsys.ops.runtime.registration import differentiable, opaque_op, saving

CHUNK = 16
"""Tokens per chunk of a sample: [B, CHUNK, CHUNK, H, D] numbers are held at a time."""

EXPORTED_CHUNK = 32
"""Tokens per chunk in an exported graph, where each step of the loop costs a copy of all outputs."""


def supports(facts: object) -> Support:
    """Supports every call."""
    return SUPPORTED


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    layout: SequenceLayout,
    *,
    beta: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Returns the output [T, H, V] and the final state [B, H, D, V]; the arguments have been validated."""
    if log_decay.dim() == 2:
        log_decay = log_decay[:, :, None].expand(q.shape)
    if initial_state is None:
        initial_state = zero_state(q, v, layout)
    if is_exporting():
        return _attend_exported(q, k, v, log_decay, beta, initial_state, layout, scale)
    if torch.compiler.is_compiling():
        facts = (layout.lengths, layout.offsets, layout.num_targets, layout.num_contextual, layout.max_len)
        return linear_attention_op(q, k, v, log_decay, beta, initial_state, *facts, scale)
    return _attend(q, k, v, log_decay, beta, initial_state, layout, scale)


def zero_state(q: Tensor, v: Tensor, layout: SequenceLayout) -> Tensor:
    """Returns the state [B, H, D, V] before any token, zeros in float32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_zeros(layout.batch_size, *q.shape[1:], v.shape[2], dtype=wide)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    state: Tensor,
    layout: SequenceLayout,
    scale: float,
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        tokens = (q.to(wide) * scale, k.to(wide), v.to(wide), log_decay.to(wide))
        tokens = tokens if beta is None else (*tokens, beta.to(wide))
        rows = _padded_rows(layout)
        padded = [torch.cat([part, part.new_zeros(1, *part.shape[1:])])[rows] for part in tokens]
        state, outputs = state.to(wide), []
        for chunk in zip(*(part.split(CHUNK, dim=1) for part in padded), strict=True):
            if chunk[0].shape[1]:  # `split` makes one empty chunk of an empty tensor
                out, state = checkpoint(_chunk, state, *chunk, use_reentrant=False, preserve_rng_state=False)
                outputs.append(out)
        of_targets = _alone(state, layout.targets_only().index, layout, tokens)
        of_history = torch.cat(outputs, dim=1).flatten(0, 1) if outputs else of_targets[:0]
        out = torch.cat([of_history, of_targets])[_places(layout, rows.shape[1])]
        return out.to(v.dtype), state


def _attend_exported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    state: Tensor,
    layout: SequenceLayout,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Computes `_attend` without gradients, by a loop that one graph holds for any number of chunks."""
    wide = torch.promote_types(q.dtype, torch.float32)
    tokens = (q.to(wide) * scale, k.to(wide), v.to(wide), log_decay.to(wide))
    tokens = tokens if beta is None else (*tokens, beta.to(wide))
    num_chunks = layout.max_len // EXPORTED_CHUNK + 2  # never 1, which a compiler treats as a special case
    place = torch.arange(num_chunks * EXPORTED_CHUNK, device=q.device)
    is_history = place < layout.history_end[:, None]
    rows = torch.where(is_history, layout.offsets[:-1, None] + place, q.shape[0])
    rows = rows.unflatten(1, (num_chunks, EXPORTED_CHUNK))
    padded = [torch.cat([part, part.new_zeros(1, *part.shape[1:])])[rows] for part in tokens]

    def more(number: Tensor, *_: Tensor) -> Tensor:
        return number < num_chunks

    def step(number: Tensor, state: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        chunk = [part.index_select(1, number[None])[:, 0] for part in padded]
        out, state = _chunk(state, *chunk)
        return number + 1, state, outputs.index_copy(1, number[None], out[:, None])

    first = torch.zeros((), dtype=torch.int64, device=q.device)
    outputs = q.new_zeros(padded[2].shape, dtype=wide)
    _, state, outputs = while_loop(more, step, (first, state.to(wide), outputs))
    of_history = outputs.flatten(0, 2)
    of_targets = _alone(state, layout.targets_only().index, layout, tokens)
    out = torch.cat([of_history, of_targets])[_places(layout, num_chunks * EXPORTED_CHUNK)]
    return out.to(v.dtype), state


def _padded_rows(layout: SequenceLayout) -> Tensor:
    """Returns the rows of contextual and history tokens, int64 [B, longest history]; -1 for padding, which is
    read as zeros."""
    history = layout.without_targets()
    return torch.cat([history.index, history.index.new_full((1,), -1)])[history.layout.padded_index().index]


def _chunk(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the output [B, c, H, V] and the state after tokens [B, c, H, ...], given the state before
    them."""
    total = g.cumsum(1)
    carried = torch.einsum("bihd,bhdv->bihv", q * total.exp(), state)
    earlier = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).tril()
    between = (total[:, :, None] - total[:, None]).masked_fill(~earlier[:, :, None, None], -torch.inf).exp()
    if beta is not None:
        # The values that the tokens actually add: v minus the value that the state returns for their keys by
        # then.
        answers = torch.einsum("bihd,bhdv->bihv", k * total.exp(), state)
        overlap = (k[:, :, None] * k[:, None] * between).sum(4).permute(0, 3, 1, 2).tril(-1)
        weight = beta.transpose(1, 2)[..., None]
        wanted = weight * (v - answers).transpose(1, 2)
        added_values = torch.linalg.solve_triangular(
            weight * overlap, wanted, upper=False, unitriangular=True
        )
        v = added_values.transpose(1, 2)
    scores = (q[:, :, None] * k[:, None] * between).sum(4)
    remains = total[:, -1]
    added = torch.einsum("bjhd,bjhv->bhdv", k * (remains[:, None] - total).exp(), v)
    out = carried + torch.einsum("bijh,bjhv->bihv", scores, v)
    return out, remains.exp()[..., None] * state + added


def _alone(state: Tensor, rows: Tensor, layout: SequenceLayout, tokens: tuple[Tensor, ...]) -> Tensor:
    """Returns the output [N, H, V] of targets, each of which continues separately from its sample's state."""
    q, k, v, g, *beta = (part[rows] for part in tokens)
    decayed = g.exp()[..., None] * state[layout.sample_ids()[rows]]
    if beta:
        v = beta[0][..., None] * (v - torch.einsum("nhd,nhdv->nhv", k, decayed))
    return torch.einsum("nhd,nhdv->nhv", q, decayed) + (q * k).sum(2, keepdim=True) * v


def _places(layout: SequenceLayout, max_len: int) -> Tensor:
    """Returns the index of each token's output, int64 [T], among the outputs of padded histories followed by
    targets."""
    samples, positions = layout.sample_ids(), layout.positions()
    is_target = positions >= layout.history_end[samples]
    behind = layout.batch_size * max_len + is_target.cumsum(0) - 1
    return torch.where(is_target, behind, samples * max_len + positions)


def _layout(
    q: Tensor, lengths: Tensor, offsets: Tensor, num_targets: Tensor, num_contextual: int, max_len: int
) -> SequenceLayout:
    total_targets = int(num_targets.sum())
    return SequenceLayout.trusted(
        lengths, offsets, num_targets, num_contextual, q.shape[0], max_len, total_targets
    )


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    state: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    num_targets: Tensor,
    num_contextual: int,
    max_len: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    layout = _layout(q, lengths, offsets, num_targets, num_contextual, max_len)
    with torch.no_grad():
        out, final = _attend(q, k, v, log_decay, beta, state, layout, scale)
    return out, final.clone()  # without any history it is the given state itself


def _backward_op(
    grad_out: Tensor,
    grad_final: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    state: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    num_targets: Tensor,
    num_contextual: int,
    max_len: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    layout = _layout(q, lengths, offsets, num_targets, num_contextual, max_len)
    with torch.enable_grad():
        names = ("q", "k", "v", "log_decay", "beta", "state")
        given = dict(zip(names, (q, k, v, log_decay, beta, state), strict=True))
        leaves = {
            name: tensor.detach().requires_grad_() for name, tensor in given.items() if tensor is not None
        }
        results = _attend(**{"beta": None, **leaves}, layout=layout, scale=scale)
        gradients = torch.autograd.grad(
            results, list(leaves.values()), (grad_out, grad_final), materialize_grads=True
        )
    by_name = dict(zip(leaves, gradients, strict=True))
    of_beta = by_name["beta"] if beta is not None else q.new_empty(0)
    return (
        *(by_name[name].contiguous() for name in ("q", "k", "v", "log_decay")),
        of_beta.contiguous(),
        by_name["state"].clone(),
    )


def _fake(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, state: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return v.new_empty(v.shape), state.new_empty(state.shape, dtype=wide)


def _fake_backward(grad_out: Tensor, grad_final: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    of_beta = rest[0].new_empty(0) if rest[4] is None else rest[4].new_empty(rest[4].shape)
    return (*(part.new_empty(part.shape) for part in rest[:4]), of_beta, rest[5].new_empty(rest[5].shape))


linear_attention_op = opaque_op("linear_attention", _forward, _fake)
linear_attention_backward_op = opaque_op("linear_attention_backward", _backward_op, _fake_backward)


def _backward(ctx: Any, grad_out: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, log_decay, of_beta, state = linear_attention_backward_op(
        grad_out, grad_final, *ctx.saved_tensors, *ctx.rest
    )
    of_beta = None if ctx.saved_tensors[4] is None else of_beta
    return (q, k, v, log_decay, of_beta, state, *(None,) * 6)


differentiable(linear_attention_op, _backward, saving(9))
