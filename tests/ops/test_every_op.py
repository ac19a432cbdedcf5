"""Tests that hold for every op, by the arguments and problems of its own tests."""

import importlib
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from recsys import ops
from recsys.ops import explain, last_backend
from tests.ops import harness
from tests.ops import test_attention_args as attention
from tests.ops.bucket_embedding import test_bucket_embedding as bucket
from tests.ops.gated_norm import test_gated_norm as gate
from tests.ops.harness import Problem, Runner, runners
from tests.ops.hstu_attention.cached import test_arguments as cached
from tests.ops.jagged import test_jagged as jagged
from tests.ops.linear_attention import test_linear_attention as linear
from tests.ops.linear_logp import test_linear_logp as logp
from tests.ops.linear_logp import test_reference as logp_reference
from tests.ops.norm_linear import test_norm_linear as norm
from tests.ops.softmax_attention import test_cross as cross
from tests.ops.softmax_attention import test_softmax_attention as softmax
from tests.ops.top_k import test_top_k as top
from tests.tools.interpreter import interpreted

RIGHT: dict[str, Callable[..., dict[str, Any]]] = {
    "bucket_embedding": lambda **changes: bucket.arguments(buckets=[torch.tensor([0, 2, 1, 1])]) | changes,
    "cross_attention": cross.arguments,
    "gated_norm": gate.arguments,
    "norm_linear": norm.arguments,
    "gather_rows": jagged.arguments,
    "linear_attention": linear.arguments,
    "linear_logp": logp_reference.arguments,
    "hstu_attention": attention.arguments,
    "hstu_attention_cached": cached.arguments,
    "softmax_attention": softmax.arguments,
    "top_k": top.arguments,
}
"""Arguments that an op takes, with changes."""


@pytest.mark.parametrize("place", ["cpu", pytest.param("interpreter", marks=interpreted)])
@pytest.mark.parametrize("op", RIGHT)
def test_a_cpu_gets_the_reference_and_nobody_a_backend_that_there_is_not(op, place):
    """Auto leaves the interpreter to those who name the kernels."""
    function, given = getattr(ops, op), RIGHT[op]()
    function(**given)
    assert last_backend(op) == "reference"
    answers = dict(explain(op, **given).rows)
    assert answers["reference"].ok
    if place == "interpreter" and "triton" in answers:
        assert answers["triton"].ok
    message = f"{op} has no backend 'cuda'; it has {', '.join(['auto', *answers])}"
    with pytest.raises(ValueError, match=re.escape(message)):
        function(**given, backend="cuda")


def rows(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


WIDE_GATE = {"attended": rows(1, 4098), "u": rows(1, 4098), "weight": rows(4098), "bias": rows(4098)}
WIDE_NORM = {"x": rows(1, 4100), "norm_weight": rows(4100), "norm_bias": rows(4100), "weight": rows(9, 4100)}


def catalogue(width, dtype):
    return {"hidden": rows(5, width, dtype=dtype), "weight": rows(9, width, dtype=dtype)}


def vectors(width):
    return {"queries": rows(2, width), "items": rows(4, width)}


@interpreted
@pytest.mark.parametrize(
    ("op", "changes", "reason"),
    [
        ("bucket_embedding", {"tables": [rows(3, 2, dtype=torch.float64)]}, "not torch.float64"),
        ("gated_norm", WIDE_GATE, "takes up to 4096"),
        ("gated_norm", WIDE_GATE | {"num_groups": 2}, ""),
        ("norm_linear", WIDE_NORM, "takes up to 4096"),
        ("gather_rows", {"values": rows(4, 2, dtype=torch.complex128)}, "has 16 bytes"),
        ("gather_rows", {"values": rows(2).double(), "index": [jagged.ONE] * 2}, "not torch.float64"),
        ("linear_logp", catalogue(128, torch.float32), ""),
        ("linear_logp", catalogue(129, torch.float32), "takes up to 128"),
        ("linear_logp", catalogue(512, torch.float16), ""),
        ("linear_logp", catalogue(513, torch.float16), "takes up to 512"),
        ("top_k", {"k": 256}, ""),
        ("top_k", {"k": 257}, "it finds up to 256"),
        ("top_k", vectors(512), ""),
        ("top_k", vectors(513), "it takes 1 to 512"),
    ],
)
def test_kernels_say_what_is_too_large_for_them(op, changes, reason):
    answer = dict(explain(op, **RIGHT[op](**changes)).rows)["triton"]
    assert answer.ok == (not reason) and reason in answer.reason


test_in_the_interpreter = harness.interpreter_test(__file__)


# --- problems of several sizes ----------------------------------------------------------------------------


class Example(NamedTuple):
    """Problems of one op, by size."""

    problem: Callable[[int], Problem]
    kernels: Sequence[str]
    """The kernels that must have one compiled form for all sizes, by module and name."""
    sizes: Sequence[int] = (1, 7, 512, 2048, 4097)
    floor: float | None = None
    """Error that a compiled graph may add to the reference's, relative to the norm; None if it must give what
    eager mode gives, to PyTorch's tolerance."""
    compiled: Callable[[int], Problem] | None = None
    """Problems for a compiled graph; None if no compiled graph holds these kernels."""
    backends: tuple[str, ...] = ("triton",)


def loss(size: int) -> Problem:
    """Rows and candidates apart, few and many."""
    return logp.plain(size, {1: 3, 7: 512, 512: 4097, 2048: 100, 4097: 7}.get(size, 900), 128)


def moves(size: int) -> Problem:
    """Rows of three sources by two maps."""
    return jagged.problem([size, 3, size], [size] * 2, (256,), torch.float32)


def states(size: int, delta: bool = False) -> Problem:
    """Six samples, three of them long."""
    return linear.problem([(size, 3), (5, 0)] * 3, (64, 64), delta=delta).cast(torch.bfloat16, **linear.WIDE)


DROPOUT = {"dropout": 0.2, "seed": gate.SEED}
PRODUCT = {"widths": (256, 256), "product": torch.bfloat16}
EXAMPLES = {
    "bucket_embedding": Example(
        lambda size: bucket.problem(size, 256, [65], torch.float32, hot=0.8),
        (
            "bucket_embedding.triton.pieces_kernel",
            "bucket_embedding.triton.shares_kernel",
            "bucket_embedding.triton.embed_kernel",
        ),
        sizes=(1024, 2048, 4097, 20_000, 100_000),
        floor=1e-6,
        compiled=lambda size: bucket.problem(size, 256, [300, 65], torch.float32),
    ),
    "gated_norm": Example(
        lambda size: gate.problem(size, 256, torch.bfloat16, **DROPOUT),
        ("gated_norm.triton.forward_kernel", "gated_norm.triton.backward_kernel"),
        compiled=lambda size: gate.problem(size, 64, torch.bfloat16, num_groups=2, **DROPOUT),
    ),
    "norm_linear": Example(
        lambda size: norm.problem(size, 256, torch.bfloat16, **PRODUCT),
        (
            "norm_linear.triton.forward_kernel",
            "norm_linear.triton.backward_kernel",
            "runtime.column_sums.sums_kernel",
        ),
    ),
    "gather_rows": Example(
        moves,
        ("jagged.triton.gather_kernel", "jagged.triton.sum_kernel"),
        compiled=moves,
    ),
    "linear_attention": Example(
        states,
        (
            "linear_attention.triton_kernels.states_kernel",
            "linear_attention.triton_kernels.state_gradients_kernel",
            "linear_attention.triton_kernels.gradients_kernel",
        ),
    ),
    "linear_attention-delta": Example(
        partial(states, delta=True), ("linear_attention.triton_kernels.gradients_kernel",)
    ),
    "linear_logp": Example(
        loss,
        (
            "linear_logp.triton_kernels.forward_kernel",
            "linear_logp.triton_kernels.backward_kernel",
            "linear_logp.triton_kernels.finish_kernel",
            "linear_logp.triton_kernels.upstream_kernel",
        ),
        floor=2**-7,
        compiled=loss,
        backends=("triton", "sm90"),
    ),
}
RUNS = [
    pytest.param(example, *runner.values, marks=runner.marks, id=f"{op}-{runner.id}")
    for op, example in EXAMPLES.items()
    for runner in runners(*example.backends, interpreter=False)
]
on_gpus = pytest.mark.parametrize(("example", "runner"), RUNS)


@pytest.mark.parametrize("op", ["bucket_embedding", "linear_logp"])
def test_a_compiled_graph_of_the_reference_is_traced_once(op):
    """Or twice: a number becomes a constant after the first call. Other ops have tests of their own."""
    example, counter = EXAMPLES[op], CompileCounterWithBackend("aot_eager")
    problems = [example.compiled(size) for size in (50, 9, 33, 20)]
    harness.assert_compiles_once(problems, harness.REFERENCE, backend=counter)
    assert 1 <= counter.frame_count <= 2


@on_gpus
def test_the_same_bits_each_time_for_all_sizes_and_one_artefact(example, runner):
    names = (name.rpartition(".") for name in example.kernels)
    kernels = [getattr(importlib.import_module(f"recsys.ops.{module}"), name) for module, _, name in names]
    harness.assert_same_bits_of_one_artefact([example.problem(n) for n in example.sizes], runner, *kernels)


@on_gpus
def test_nothing_waits_for_the_device(example, runner):
    harness.assert_nothing_waits(example.problem(500), runner)


@pytest.mark.gpu
@pytest.mark.parametrize("op", [op for op, example in EXAMPLES.items() if example.compiled is not None])
def test_a_compiled_graph_serves_all_sizes(op):
    example = EXAMPLES[op]
    problems = [example.compiled(size) for size in (50, 9, 3000)]
    harness.assert_compiles_once(problems, Runner("triton", "cuda"), example.floor)
