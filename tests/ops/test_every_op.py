"""Tests that every op, case and backend must pass, by the arguments and problems of the op's own tests."""

import importlib
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from recsys import ops
from recsys.ops import SequenceLayout, explain, last_backend
from tests.ops import harness
from tests.ops import test_attention_args as attention
from tests.ops.bucket_embedding import test_bucket_embedding as bucket
from tests.ops.gated_norm import test_gated_norm as gate
from tests.ops.harness import REFERENCE, Case, OpTests, Problem, Runner, runners
from tests.ops.hstu_attention import test_hstu_attention as hstu
from tests.ops.hstu_attention.cached import test_arguments as cached_arguments
from tests.ops.hstu_attention.cached import test_hstu_attention_cached as cached
from tests.ops.jagged import test_jagged as jagged
from tests.ops.linear_attention import test_linear_attention as linear
from tests.ops.linear_logp import test_linear_logp as logp
from tests.ops.linear_logp import test_reference as logp_reference
from tests.ops.norm_linear import test_norm_linear as norm
from tests.ops.softmax_attention import test_cross as cross
from tests.ops.softmax_attention import test_softmax_attention as softmax
from tests.ops.top_k import test_top_k as top
from tests.tools.interpreter import WithNumbersOnly, interpreted

MODULES = {
    "bucket_embedding": bucket,
    "gated_norm": gate,
    "gather_rows": jagged,
    "hstu_attention": hstu,
    "hstu_attention_cached": cached,
    "linear_attention": linear,
    "linear_logp": logp,
    "norm_linear": norm,
}
"""Files with the `OpTests` of an op."""

SMALL = {name: sizes for module in MODULES.values() for name, sizes in module.SMALL.items()}

INTERPRETER, ON_GPU = Runner("triton", "cpu"), Runner("triton", "cuda")

RIGHT: dict[str, Callable[..., dict[str, Any]]] = {
    "bucket_embedding": lambda **changes: bucket.arguments(buckets=[torch.tensor([0, 2, 1, 1])]) | changes,
    "cross_attention": cross.arguments,
    "gated_norm": gate.arguments,
    "norm_linear": norm.arguments,
    "gather_rows": jagged.arguments,
    "linear_attention": linear.arguments,
    "linear_logp": logp_reference.arguments,
    "hstu_attention": attention.arguments,
    "hstu_attention_cached": cached_arguments.arguments,
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


# --- cases of each op ---------------------------------------------------------------------------------------


def demands(op: str) -> OpTests:
    return MODULES[op].TESTS


def cases(field: str) -> list[Any]:
    """Parameters of a test: an op, and a case of it."""
    return [
        pytest.param(op, case, id=f"{op}-{case}") for op in MODULES for case in getattr(demands(op), field)
    ]


def having(field: str) -> Any:
    """The test runs for all ops that have such cases."""
    return pytest.mark.parametrize(
        "op", [op for op in MODULES if getattr(demands(op), field) not in (None, ())]
    )


by_kernels = pytest.mark.parametrize("runner", runners("triton"))
everywhere = pytest.mark.parametrize("runner", runners("reference", "triton"))


def check(op: str, case: Case, runner: Runner, **view: Any) -> None:
    demands(op).compare(case.problem(), runner, **case.near, **view)


@pytest.mark.parametrize(("op", "case"), cases("exact"))
def test_the_reference_is_the_formulas(op, case):
    """Output and all gradients, in float64."""
    harness.assert_is(case.problem(), demands(op).expected, demands(op).close)


@by_kernels
@pytest.mark.parametrize(("op", "case"), cases("kernels"))
def test_kernels_come_near_to_float64(op, case, runner):
    """Output and all gradients."""
    check(op, case, runner)


@everywhere
@pytest.mark.parametrize(("op", "case"), cases("everywhere"))
def test_every_backend_is_right(op, case, runner):
    """Output and all gradients."""
    check(op, case, runner)


@everywhere
@pytest.mark.parametrize(("op", "case"), cases("empty"))
def test_without_tokens_no_gradient_is_anything_but_zeros(op, case, runner):
    given = case.problem().cast(torch.float32)
    made, wanted = (harness.results(given, each) for each in (runner, REFERENCE))
    assert [tensor.shape for tensor in made] == [tensor.shape for tensor in wanted]
    assert not any(tensor.any() for tensor in made)


@by_kernels
@having("halves")
def test_16_bits(op, runner):
    for case in demands(op).halves:
        check(op, case(runner.half), runner)


@by_kernels
@pytest.mark.parametrize("view", [harness.apart, harness.strided, harness.turned])
@having("strided")
def test_tensors_and_cotangents_with_other_strides(op, view, runner):
    check(op, demands(op).strided, runner, view=view)


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "case"), cases("on_gpus"))
def test_larger_cases(op, case):
    check(op, case, ON_GPU)


@pytest.mark.gpu
@having("random")
@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(data=st.data())
def test_random_cases(op, data):
    check(op, data.draw(demands(op).random), ON_GPU)


BUFFERS = {
    "gated_norm": 5,
    "gather_rows": 2,
    "hstu_attention": 4,
    "hstu_attention_cached": 1,
    "linear_logp": 6,
}
"""Least number of outputs, gradients and intermediate results that an op makes."""


@interpreted
@pytest.mark.parametrize("op", BUFFERS)
def test_nothing_is_written_past_the_last_row(op, monkeypatch):
    given = demands(op).guarded.problem().cast(torch.float32)
    with harness.guarded_memory(monkeypatch) as buffers:
        harness.results(given, INTERPRETER)
    assert len(buffers) >= BUFFERS[op]


@by_kernels
@having("library")
def test_the_library_ops(op, runner, monkeypatch):
    """Schemas, shapes without numbers and gradients through the library, on which a compiler relies."""
    if runner.is_interpreted:
        monkeypatch.setattr(SequenceLayout, "host_copy", None)  # as if the lengths were on a device
        for name in demands(op).wrapped:
            monkeypatch.setattr(importlib.import_module(f"recsys.ops.{name}"), "wrap_triton", WithNumbersOnly)
    for library_op, arguments, differentiable in demands(op).library(runner.device):
        harness.opcheck(library_op, arguments, differentiable=differentiable)


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
            "linear_attention.triton_kernels.value_gradients_kernel",
            "linear_attention.triton_kernels.key_gradients_kernel",
        ),
    ),
    "linear_attention-delta": Example(
        partial(states, delta=True), ("linear_attention.triton_kernels.key_gradients_kernel",)
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


def kernels_of(example: Example) -> list[Any]:
    names = (name.rpartition(".") for name in example.kernels)
    return [getattr(importlib.import_module(f"recsys.ops.{module}"), name) for module, _, name in names]


def test_kernels_of_examples_exist():
    """Here, too, where no GPU runs them."""
    for example in EXAMPLES.values():
        assert all(kernel.__name__.endswith("_kernel") for kernel in kernels_of(example))


@pytest.mark.parametrize("op", ["bucket_embedding", "linear_logp"])
def test_a_compiled_graph_of_the_reference_is_traced_once(op):
    """Or twice: a number becomes a constant after the first call. Other ops have tests of their own."""
    example, counter = EXAMPLES[op], CompileCounterWithBackend("aot_eager")
    problems = [example.compiled(size) for size in (50, 9, 33, 20)]
    harness.assert_compiles_once(problems, REFERENCE, backend=counter)
    assert 1 <= counter.frame_count <= 2


@on_gpus
def test_the_same_bits_each_time_for_all_sizes_and_one_artefact(example, runner):
    kernels = kernels_of(example)
    harness.assert_same_bits_of_one_artefact([example.problem(n) for n in example.sizes], runner, *kernels)


@on_gpus
def test_nothing_waits_for_the_device(example, runner):
    harness.assert_nothing_waits(example.problem(500), runner)


@pytest.mark.gpu
@pytest.mark.parametrize("op", [op for op, example in EXAMPLES.items() if example.compiled is not None])
def test_a_compiled_graph_serves_all_sizes(op):
    example = EXAMPLES[op]
    problems = [example.compiled(size) for size in (50, 9, 3000)]
    harness.assert_compiles_once(problems, ON_GPU, example.floor)
