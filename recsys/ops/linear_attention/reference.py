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
from torch._higher_order_ops.while_loop import while_loop_op
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils.checkpoint import checkpoint

from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.linear_attention import Inputs
from recsys.ops.runtime.dispatch import is_exporting
from recsys.ops.runtime.registration import differentiable, flat_signature, opaque_op, saving

CHUNK = 16
"""Tokens per chunk of a sample: [B, CHUNK, CHUNK, H, D] numbers are held at a time."""

EXPORTED_CHUNK = 32
"""Tokens per chunk in an exported graph, where each step of the loop costs a copy of all outputs."""


def run(inputs: Inputs, layout: SequenceLayout, scale: float) -> tuple[Tensor, Tensor]:
    """Returns the output [T, H, V] and the final state [B, H, D, V]; the arguments have been validated."""
    if inputs.log_decay.dim() == 2:
        inputs = inputs._replace(log_decay=inputs.log_decay[:, :, None].expand(inputs.q.shape))
    if statically_known_true(layout.total_targets == layout.total_len):
        return _attend_targets(inputs, layout, scale)
    if is_exporting():
        return _attend_exported(inputs, layout, scale)
    if torch.compiler.is_compiling():
        facts = (layout.lengths, layout.offsets, layout.num_targets, layout.num_contextual, layout.max_len)
        return linear_attention_op(*inputs, *facts, scale)
    return _attend(inputs, layout, scale)


def _attend(inputs: Inputs, layout: SequenceLayout, scale: float) -> tuple[Tensor, Tensor]:
    q, v = inputs.q, inputs.v
    with torch.autocast(q.device.type, enabled=False):
        tokens, state = _wide(inputs, scale)
        rows = _padded_rows(layout)
        padded = [torch.cat([part, part.new_zeros(1, *part.shape[1:])])[rows] for part in tokens]
        outputs = []
        for chunk in zip(*(part.split(CHUNK, dim=1) for part in padded), strict=True):
            if chunk[0].shape[1]:  # `split` makes one empty chunk of an empty tensor
                out, state = checkpoint(_chunk, state, *chunk, use_reentrant=False, preserve_rng_state=False)
                outputs.append(out)
        of_targets = _alone(state, layout.targets_only().index, layout, tokens)
        of_history = torch.cat(outputs, dim=1).flatten(0, 1) if outputs else of_targets[:0]
        out = torch.cat([of_history, of_targets])[_places(layout, rows.shape[1])]
        return out.to(v.dtype), state


def _attend_targets(inputs: Inputs, layout: SequenceLayout, scale: float) -> tuple[Tensor, Tensor]:
    """Computes `_attend` where there is no history, as behind a cache."""
    with torch.autocast(inputs.q.device.type, enabled=False):
        tokens, state = _wide(inputs, scale)
        rows = torch.arange(layout.total_len, device=layout.device)
        return _alone(state, rows, layout, tokens).to(inputs.v.dtype), state.clone()


def _wide(inputs: Inputs, scale: float) -> tuple[tuple[Tensor, ...], Tensor]:
    """Returns what `_chunk` takes after the state, for all tokens, and the state: in float32 or wider."""
    wide = torch.promote_types(inputs.q.dtype, torch.float32)
    *tokens, state = (None if tensor is None else tensor.to(wide) for tensor in inputs)
    tokens[0] = tokens[0] * scale
    return tuple(tensor for tensor in tokens if tensor is not None), state


def _attend_exported(inputs: Inputs, layout: SequenceLayout, scale: float) -> tuple[Tensor, Tensor]:
    """Computes `_attend` without gradients, by a loop that one graph holds for any number of chunks."""
    q, v = inputs.q, inputs.v
    tokens, state = _wide(inputs, scale)
    num_chunks = layout.max_len // EXPORTED_CHUNK + 2  # never 1, which a compiler treats as a special case
    place = torch.arange(num_chunks * EXPORTED_CHUNK, device=q.device)
    is_history = place < layout.history_end[:, None]
    rows = torch.where(is_history, layout.offsets[:-1, None] + place, q.shape[0])
    rows = rows.unflatten(1, (num_chunks, EXPORTED_CHUNK))
    padded = [torch.cat([part, part.new_zeros(1, *part.shape[1:])])[rows] for part in tokens]

    end = place.new_full((), num_chunks)

    def more(number: Tensor, state: Tensor, outputs: Tensor, end: Tensor, *_: Tensor) -> Tensor:
        return number < end

    def step(
        number: Tensor, state: Tensor, outputs: Tensor, end: Tensor, *padded: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        chunk = [part.index_select(1, number[None])[:, 0] for part in padded]
        out, state = _chunk(state, *chunk)
        return number + 1, state, outputs.index_copy(1, number[None], out[:, None])

    first = torch.zeros((), dtype=torch.int64, device=q.device)
    outputs = q.new_zeros(padded[2].shape, dtype=state.dtype)
    # `while_loop` would compile the functions of the loop before they are traced.
    _, state, outputs = while_loop_op(more, step, (first, state, outputs), (end, *padded))
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


FACTS = {
    **dict.fromkeys(("lengths", "offsets", "num_targets"), Tensor),
    **dict.fromkeys(("num_contextual", "max_len"), int),
    "scale": float,
}
"""Parameters of the library ops after the inputs."""


def _rebuilt(arguments: tuple[Any, ...]) -> tuple[Inputs, SequenceLayout, float]:
    """Returns what `_attend` takes from the flat arguments of a library op."""
    inputs, (*tensors, num_contextual, max_len, scale) = Inputs(*arguments[:6]), arguments[6:]
    sizes = (inputs.q.shape[0], max_len, int(tensors[2].sum()))
    return inputs, SequenceLayout.trusted(*tensors, num_contextual, *sizes), scale


@flat_signature(Inputs, FACTS, returns=tuple[Tensor, Tensor])
def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        out, final = _attend(*_rebuilt(arguments))
    return out, final.clone()  # without any history it is the given state itself


@flat_signature({"grad_out": Tensor, "grad_final": Tensor}, Inputs, FACTS, returns=tuple[(Tensor,) * 6])
def _backward_op(grad_out: Tensor, grad_final: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    inputs, layout, scale = _rebuilt(arguments)
    with torch.enable_grad():
        leaves = Inputs(*(None if tensor is None else tensor.detach().requires_grad_() for tensor in inputs))
        results = _attend(leaves, layout, scale)
        present = [tensor for tensor in leaves if tensor is not None]
        gradients = torch.autograd.grad(results, present, (grad_out, grad_final), materialize_grads=True)
    *of_tokens, of_state = (gradient.contiguous() for gradient in gradients)
    if inputs.beta is None:
        of_tokens.append(inputs.q.new_empty(0))
    return (*of_tokens, of_state.clone())


def _fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    q, _, v, _, _, state, *_ = arguments
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
