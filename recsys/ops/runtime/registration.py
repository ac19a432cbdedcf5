"""How a function becomes one node of a traced graph: the one place where ops are made known to PyTorch.

In eager mode no call comes through here: dispatch through the library costs about 60 us, so autograd
functions are called directly. In graphs an op is one of two kinds:

- `visible`: it launches Triton kernels through `wrap_triton`. A compiler sees them, and a package embeds them
  as machine code and needs neither Python nor this library.
- `opaque`: nobody looks inside (kernels of Gluon, loops over blocks). It needs to say what shapes come out,
  and a package that held one would call Python: the backends that use it say no to an export.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

SetupContext = Callable[[Any, tuple[Any, ...], Any], None]

Backward = Callable[..., Any]


def traceable_op(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorates a function of tensors and plain values, with annotations, as the op `recsys::<name>`.

    Where it is traced, every call of a kernel in it must go through `torch.library.wrap_triton`.
    """
    return torch.library.triton_op(f"recsys::{name}", mutates_args=())


def opaque_op(
    name: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    devices: Sequence[str] = ("default",),
    arguments: str | None = None,
) -> Any:
    """The op `recsys::<name>`.

    Args:
        run: changes none of its arguments, and returns none of them.
        fake: as `run`, for tensors without numbers: new ones of the shapes, types and strides of what `run`
            returns.
        devices: where `run` works; everywhere by default.
        arguments: the schema behind the name, `(Tensor x, int n) -> Tensor`; None: that of the annotations of
            `run`.
    """
    full_name = f"recsys::{name}"
    torch.library.define(full_name, arguments or torch.library.infer_schema(run, mutates_args=()))
    torch.library.impl(full_name, tuple(devices), run)
    torch.library.register_fake(full_name, fake)
    return getattr(torch.ops.recsys, name).default


def differentiable(op: Any, backward: Backward, setup_context: SetupContext) -> None:
    """Gradients of an op in graphs, by another op: `backward(ctx, *grad_outputs)` gives one an input."""
    torch.library.register_autograd(op, backward, setup_context=setup_context)


def saving(num_tensors: int) -> SetupContext:
    """A `setup_context` that keeps the first inputs, tensors or None, in `ctx.saved_tensors`, and the others
    in `ctx.rest`."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:num_tensors])
        ctx.rest = inputs[num_tensors:]

    return setup_context
