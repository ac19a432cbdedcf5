"""Turns functions into library ops, each one node of a traced graph.

The package registers ops with PyTorch only here. Eager mode calls autograd functions directly, since dispatch
through the library costs about 60 us. In graphs an op is of one of two kinds:

- `traceable_op`: launches Triton kernels through `wrap_triton`. A compiler sees them, and a package embeds
  them as machine code and needs neither Python nor this library.
- `opaque_op`: hides its body from compilers (kernels in Gluon, loops over blocks). It must declare the shapes
  of its results, and a package that held one would call Python, so its backends refuse to be exported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import torch

SetupContext = Callable[[Any, tuple[Any, ...], Any], None]

Backward = Callable[..., Any]


def traceable_op(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorates an annotated function of tensors and plain values as the op `recsys::<name>`.

    While it is traced, every kernel launch in it must go through `torch.library.wrap_triton`.
    """
    return torch.library.triton_op(f"recsys::{name}", mutates_args=())


def flat_signature(*parts: type | dict[str, Any], returns: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorates `f(*arguments)` with the flat signature from which PyTorch infers the schema of a library op.

    Args:
        parts: named tuples, whose fields become parameters in their order, or parameters by name with their
            annotations.
        returns: annotation of the result.
    """
    hints = [part if isinstance(part, dict) else get_type_hints(part) for part in parts]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        inspect.Parameter(name, kind, annotation=hint) for part in hints for name, hint in part.items()
    ]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        function.__signature__ = inspect.Signature(parameters, return_annotation=returns)  # type: ignore[attr-defined]
        return function

    return decorate


def opaque_op(
    name: str, run: Callable[..., Any], fake: Callable[..., Any], *, devices: Sequence[str] = ("default",)
) -> Any:
    """Defines the op `recsys::<name>`.

    Args:
        run: the implementation, which neither changes nor returns any of its arguments; its annotations give
            the schema.
        fake: `run` for tensors without data; returns new tensors with the shapes, dtypes and strides of the
            results.
        devices: device types on which `run` works; all by default.
    """
    full_name = f"recsys::{name}"
    torch.library.define(full_name, torch.library.infer_schema(run, mutates_args=()))
    torch.library.impl(full_name, tuple(devices), run)
    torch.library.register_fake(full_name, fake)
    return getattr(torch.ops.recsys, name).default


def differentiable(op: Any, backward: Backward, setup_context: SetupContext) -> None:
    """Gives an op gradients in graphs, by another op: `backward(ctx, *grad_outputs)` returns one gradient per
    input."""
    torch.library.register_autograd(op, backward, setup_context=setup_context)


def saving(num_tensors: int) -> SetupContext:
    """Returns a `setup_context` that saves the first `num_tensors` inputs (tensors or None) as
    `ctx.saved_tensors` and the others as `ctx.rest`."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:num_tensors])
        ctx.rest = inputs[num_tensors:]

    return setup_context
