"""Calls of `hstu_attention_cached` as problems of the harness: samples cut into a cache and new tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from recsys.ops import RelativeBias, SequenceLayout, hstu_attention_cached
from tests.ops import attention, harness
from tests.ops.attention import BIAS, CAUSAL, samples_of
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
        arguments = [between_poison(value) if isinstance(value, Tensor) else value for value in arguments]
        if bias is not None:
            times = (bias.timestamps, bias.next_timestamps, bias.cache_timestamps)
            bias = type(bias)(bias.position_table, bias.time_table, *map(between_poison, times))
    return hstu_attention_cached(*arguments, mask, bias=bias, backend=backend, **rest)


def cached(given: Problem, num_cached: list[int]) -> Problem:
    """The same attention of new tokens only, behind `num_cached` events of each sample, or all."""
    options = given.options | {"parts": cut(samples_of(given.options["layout"]), num_cached)}
    return Problem("hstu_attention_cached", attend, given.tensors, options)


def behind(num_cached: list[int], *given, **options) -> Problem:
    """`tests.ops.attention.problem` of the other arguments, behind a cache."""
    return cached(attention.problem(*given, **options), num_cached)


def whole(new: Problem) -> Problem:
    """The problem of whole samples that `cached` has cut."""
    options = {name: value for name, value in new.options.items() if name != "parts"}
    return Problem("hstu_attention", attention.attend, new.tensors, options)


def check(new: Problem, runner: Runner, view=None) -> None:
    """Against the reference's rows of whole samples, in float64."""
    (ours,) = harness.results(new.cast(torch.float64 if runner == REFERENCE else torch.float32), runner, view)
    # Products in three passes of TF32 on a GPU are not as near as the interpreter's.
    close = 1e-12 if runner == REFERENCE else 2e-5 if runner.is_interpreted else 1e-4
    harness.assert_close([ours], [new.options["parts"].new(output(whole(new), REFERENCE))], close)


def assert_near(new: Problem, runner: Runner, view=None) -> Tensor:
    """Not further from float64 than twice the reference of whole samples in the same type; the output."""
    given, by_reference = whole(new), Runner("reference", runner.device)
    parts = new.options["parts"].to(runner.device)
    (ours,) = harness.results(new, runner, view)
    theirs, exact = (parts.new(output(each, by_reference)) for each in (given, given.cast(torch.float64)))
    harness.assert_as_near([ours], [theirs], [exact], floor=1e-5, absolute=1e-12)
    return ours


def output(given: Problem, runner: Runner) -> Tensor:
    """The output without its history."""
    ((out,), _) = harness.call(given, runner)
    return out.detach()


class Candidates:
    """Candidates and what is cached of their users: parts of one projection, rows of NaN behind the cache."""

    def __init__(
        self, cached, targets, dim, dtype=torch.bfloat16, heads=4, contextual=0, seed=0, device="cuda"
    ):
        targets, cached = torch.tensor(targets), torch.tensor(cached)
        self.layout = SequenceLayout(targets, targets).to(device)
        self.cache_layout = SequenceLayout(cached, None, contextual).to(device)
        joined = harness.normal(self.layout.total_len, 3 * heads * dim, seed=seed, dtype=dtype).to(device)
        self.new = [part.view(-1, heads, dim) for part in joined.split(heads * dim, 1)]
        total = self.cache_layout.total_len
        room = harness.normal(2, total + 300, heads, dim, seed=seed + 1, dtype=dtype).to(device)
        room[:, total:] = torch.nan
        self.cache = [room[0, :total], room[1, :total]]

    def attend(self, mask=CAUSAL, backend="sm90", dtype=None):
        new, cache = ([t.to(dtype or t.dtype) for t in tensors] for tensors in (self.new, self.cache))
        return hstu_attention_cached(
            *new, self.layout, *cache, self.cache_layout, mask, scale_len=50, backend=backend
        )

    def assert_near(self, got, mask) -> None:
        """Not further from float64 than twice the reference in the same type."""
        exact = self.attend(mask, "reference", torch.float64)
        harness.assert_as_near([got], [self.attend(mask, "reference")], [exact], floor=1e-3)
