"""Calls of `hstu_attention_cached` as problems of the harness: samples cut into a cache and new tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from recsys.ops import RelativeBias, hstu_attention_cached
from tests.ops import harness
from tests.ops.attention import BIAS, samples_of
from tests.ops.cases import cut
from tests.ops.harness import REFERENCE, Problem, Runner
from tests.tools.interpreter import INTERPRETED, between_poison


def attend(q, k, v, *, layout, mask, parts, backend, **rest):
    """The rows of the new tokens; in the interpreter all that is given lies between poison."""
    parts = parts.to(q.device)
    arguments = parts.arguments(q, k, v)
    bias = RelativeBias(*(rest.pop(name) for name in BIAS)) if "time_table" in rest else None
    bias = None if bias is None else parts.bias(bias)
    if INTERPRETED and backend == "triton":
        arguments = [between_poison(one) if isinstance(one, Tensor) else one for one in arguments]
        if bias is not None:
            times = (bias.timestamps, bias.next_timestamps, bias.cache_timestamps)
            bias = type(bias)(bias.position_table, bias.time_table, *map(between_poison, times))
    return hstu_attention_cached(*arguments, mask, bias=bias, backend=backend, **rest)


def cached(given: Problem, num_cached: list[int]) -> Problem:
    """The same attention of new tokens only, behind `num_cached` events of each sample, or all."""
    options = given.options | {"parts": cut(samples_of(given.options["layout"]), num_cached)}
    return Problem("hstu_attention_cached", attend, given.tensors, options)


def check(given: Problem, num_cached: list[int], runner: Runner) -> None:
    """Against the reference's rows of whole samples, in float64."""
    new = cached(given, num_cached)
    ours = output(new.cast(torch.float64 if runner == REFERENCE else torch.float32), runner)
    # Products in three passes of TF32 on a GPU are not as near as the interpreter's.
    close = 1e-12 if runner == REFERENCE else 2e-5 if runner.is_interpreted else 1e-4
    harness.assert_close([ours], [new.options["parts"].new(output(given, REFERENCE))], close)


def assert_near(given: Problem, num_cached: list[int], runner: Runner) -> Tensor:
    """Not further from float64 than twice the reference of whole samples in the same type; the output."""
    new, by_reference = cached(given, num_cached), Runner("reference", runner.device)
    parts = new.options["parts"].to(runner.device)
    ours = output(new, runner)
    theirs, exact = (parts.new(output(one, by_reference)) for one in (given, given.cast(torch.float64)))
    harness.assert_as_near([ours], [theirs], [exact], floor=1e-5, absolute=1e-12)
    return ours


def output(given: Problem, runner: Runner) -> Tensor:
    """The output without its history."""
    ((out,), _) = harness.call(given, runner)
    return out.detach()
