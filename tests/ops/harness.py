"""One body for an op's tests on every backend: the reference, Triton's interpreter on a CPU, a GPU.

A test takes a `Runner` from `runners("triton", ...)` and hands a `Problem` to `assert_near`:

    def problem(rows, width, **options) -> Problem:
        tensors = {"x": normal(rows, width), "weight": normal(width, seed=1)}
        return Problem("my_op", my_op, tensors, options)

    @pytest.mark.parametrize("runner", runners("triton", "sm90"))
    def test_output_and_all_gradients(runner):
        assert_near(problem(7, 20), runner, close=1e-4)

    test_in_the_interpreter = interpreter_test(__file__)

Tests of the interpreter run in a process of their own (`tests.tools.interpreter`); the last line starts it.
In that process `tests/ops/conftest.py` fills uninitialised memory with NaN, every tensor of a problem lies
between NaNs (absurd numbers for integers), and a file's `SMALL` makes blocks small, so that small inputs have
several. Tests on a GPU bear the mark `gpu`.

What must hold of every op is in `test_every_op.py`, which takes the `OpTests` of the op's own file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.fx.experimental import _config as fx_config

from recsys.ops import SequenceLayout, explain, last_backend
from recsys.ops.runtime.dispatch import Op
from tests.tools.interpreter import between_poison, interpreted, run_interpreted, starts_it

GUARD = 777.0
"""The number in memory around a buffer."""

MARGIN = 999
"""Numbers of guard behind a buffer."""


class Runner(NamedTuple):
    """A backend, and the device that it runs on."""

    backend: str
    device: str

    @property
    def is_interpreted(self) -> bool:
        """True if kernels run in Triton's interpreter."""
        return self.device == "cpu" and self.backend != "reference"

    @property
    def half(self) -> torch.dtype:
        """The 16-bit type to test; the interpreter lacks bfloat16."""
        return torch.float16 if self.is_interpreted else torch.bfloat16


REFERENCE = Runner("reference", "cpu")


def is_hopper() -> bool:
    """True if the first GPU is a Hopper."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


needs_hopper = pytest.mark.skipif(not is_hopper(), reason="needs a Hopper GPU")


def runners(*backends: str, interpreter: bool = True) -> list[Any]:
    """Parameters of a test, a `Runner` each: "reference" on the CPU, "triton" interpreted and on a GPU,
    "sm90" on a Hopper GPU."""
    params = []
    for backend in backends:
        if backend == "reference":
            params.append(pytest.param(REFERENCE, id="reference"))
        elif backend == "triton":
            if interpreter:
                params.append(pytest.param(Runner("triton", "cpu"), id="interpreted", marks=interpreted))
            params.append(pytest.param(Runner("triton", "cuda"), id="triton", marks=pytest.mark.gpu))
        else:
            marks = [pytest.mark.gpu, needs_hopper]
            params.append(pytest.param(Runner(backend, "cuda"), id=backend, marks=marks))
    return params


def interpreter_test(file: str) -> Callable[[], None]:
    """The test that runs the interpreted tests of `file`, in a process of their own."""

    def test_in_the_interpreter():
        run_interpreted(file)

    return starts_it(test_in_the_interpreter)


# --- problems ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Problem:
    """Arguments of one call of an op.

    Attributes:
        op: its name, for `last_backend`.
        function: takes `tensors`, `options` and `backend` by name; returns a tensor or several.
        tensors: floating point, on the CPU; gradients are computed for all of them.
        options: everything else. Integer tensors in it, and in its lists, move to the runner's device, as
            layouts do.
    """

    op: str
    function: Callable[..., Any]
    tensors: dict[str, Tensor]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def cast(self, dtype: torch.dtype, **others: torch.dtype) -> Problem:
        """The same numbers in `dtype`, and those tensors that are named in their own types."""
        cast = {name: tensor.to(others.get(name, dtype)) for name, tensor in self.tensors.items()}
        return dataclasses.replace(self, tensors=cast)

    def with_options(self, **options: Any) -> Problem:
        """The same problem with further options."""
        return dataclasses.replace(self, options=self.options | options)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers that depend on the seed and the shape alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


class Case:
    """A problem that is built when a test asks for it, and what its results may differ by.

    Args:
        build: makes the problem of the arguments; these name the case.
        near: arguments of `assert_near`.
    """

    def __init__(
        self, build: Callable[..., Problem], *given: Any, near: dict[str, Any] | None = None, **more: Any
    ):
        self._build, self._given, self._more, self.near = build, given, more, near or {}

    def problem(self) -> Problem:
        return self._build(*self._given, **self._more)

    def __str__(self) -> str:
        return "-".join(map(str, (*self._given, *self._more.values())))


def call(
    problem: Problem, runner: Runner, view: Callable[[Tensor], Tensor] | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs and the leaves on the runner's device, as `view` shows them; asserts that the runner's
    backend ran."""

    def placed(value: Any) -> Any:
        if isinstance(value, Tensor):
            value = value.to(runner.device)
            return between_poison(value) if runner.is_interpreted and value.dim() else value
        if isinstance(value, SequenceLayout):  # one that is there already keeps what it has been asked for
            return value if value.device.type == runner.device else value.to(runner.device)
        return [placed(entry) for entry in value] if isinstance(value, list) else value

    leaves = {name: placed(tensor.detach()) for name, tensor in problem.tensors.items()}
    if view is not None:
        leaves = {name: view(tensor) for name, tensor in leaves.items()}
    leaves = {name: tensor.requires_grad_() for name, tensor in leaves.items()}
    options = {name: placed(value) for name, value in problem.options.items()}
    out = problem.function(**leaves, **options, backend=runner.backend)
    assert last_backend(problem.op) == runner.backend
    return [out] if isinstance(out, Tensor) else list(out), list(leaves.values())


def strided(tensor: Tensor) -> Tensor:
    """The same numbers, those of a row apart and with NaN between them, as in a part of a larger tensor."""
    return torch.stack([tensor, torch.full_like(tensor, torch.nan)], dim=-1)[..., 0]


def apart(tensor: Tensor) -> Tensor:
    """The same numbers in rows that are further apart, with NaN between them."""
    if tensor.dim() < 2:
        return tensor
    return torch.cat([tensor, torch.full_like(tensor, torch.nan)], dim=-1)[..., : tensor.shape[-1]]


def turned(tensor: Tensor) -> Tensor:
    """The same numbers with the first dimension innermost in memory, as in a transposed tensor."""
    return tensor.movedim(0, -1).contiguous().movedim(-1, 0) if tensor.dim() > 1 else tensor


def results(problem: Problem, runner: Runner, view: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """Outputs, then the gradients of all tensors for random cotangents, which differ between outputs.

    Leaves and cotangents are passed as `view` shows them. An op without gradients has outputs only.
    """
    outputs, leaves = call(problem, runner, view)
    made = [out.detach() for out in outputs]
    if not any(out.requires_grad for out in outputs):
        return made
    return made + gradients(outputs, leaves, poisoned=runner.is_interpreted, view=view)


def gradients(
    outputs: Sequence[Tensor],
    leaves: Sequence[Tensor],
    *,
    poisoned: bool = False,
    view: Callable[[Tensor], Tensor] | None = None,
) -> list[Tensor]:
    """Gradients for cotangents that are the same numbers on any device and in any type: 16 bits hold them."""
    cotangents = [
        normal(*out.shape, seed=100 + index, dtype=torch.bfloat16).to(out)
        for index, out in enumerate(outputs)
    ]
    if poisoned:
        cotangents = [between_poison(cotangent) if cotangent.dim() else cotangent for cotangent in cotangents]
    if view is not None:
        cotangents = [view(cotangent) for cotangent in cotangents]
    return list(torch.autograd.grad(list(outputs), list(leaves), cotangents))


# --- numbers ----------------------------------------------------------------------------------------------


def assert_close(got: Sequence[Tensor], want: Sequence[Tensor], close: float) -> None:
    """Entry by entry, relative or absolute, in float64."""
    for actual, expected in zip(got, want, strict=True):
        torch.testing.assert_close(actual.cpu().double(), expected.cpu().double(), rtol=close, atol=close)


def assert_equal(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    """Bit by bit."""
    assert all(torch.equal(actual, expected) for actual, expected in zip(got, want, strict=True))


def assert_is(problem: Problem, expected: Callable[..., Any], close: float = 1e-11) -> None:
    """The reference in float64 agrees with `expected`, which takes what the op takes, less the backend."""
    outputs, leaves = call(problem.cast(torch.float64), REFERENCE)
    named = dict(zip(problem.tensors, leaves, strict=True))
    wanted = expected(**named, **problem.options)
    wanted = [wanted] if isinstance(wanted, Tensor) else list(wanted)
    assert_close(outputs, wanted, close)
    assert_close(gradients(outputs, leaves), gradients(wanted, leaves), close)


class Compared(NamedTuple):
    """Outputs and gradients of one problem: the runner's, the reference's, and those of float64."""

    ours: list[Tensor]
    theirs: list[Tensor]
    exact: list[Tensor]


def assert_near(
    problem: Problem,
    runner: Runner,
    *,
    close: float | None = None,
    floor: float = 1e-6,
    slack: float = 0.0,
    absolute: float = 0.0,
    view: Callable[[Tensor], Tensor] | None = None,
) -> Compared:
    """The runner's outputs and gradients have the reference's types and are near those of float64, as by
    `assert_as_near`. With `close` the interpreter's entries are also compared, as by `assert_close`. The
    runner gets its tensors as `view` shows them.
    """
    ours = results(problem, runner, view)
    theirs = results(problem, Runner("reference", runner.device))
    exact = results(problem.cast(torch.float64), Runner("reference", runner.device))
    finite = assert_as_near(ours, theirs, exact, floor=floor, slack=slack, absolute=absolute)
    if close is not None and runner.is_interpreted:
        for got, want, numbers in zip(ours, exact, finite, strict=True):
            assert_close([got[numbers]], [want[numbers]], close)
    return Compared(ours, theirs, exact)


def assert_as_near(
    ours: Sequence[Tensor],
    theirs: Sequence[Tensor],
    exact: Sequence[Tensor],
    *,
    floor: float = 1e-6,
    slack: float = 0.0,
    absolute: float = 0.0,
) -> list[Tensor]:
    """By norm an error may be twice that of the others in the same types, plus `floor` of the exact norm,
    plus `slack` an entry, plus `absolute`. Returns which entries are finite: the same ones in all."""
    masks = []
    for got, reference, want in zip(ours, theirs, exact, strict=True):
        assert got.dtype == reference.dtype and got.shape == reference.shape
        finite = want.isfinite()
        assert torch.equal(got.isfinite(), finite)
        masks.append(finite)
        got, reference, want = (
            torch.where(finite, numbers.double(), 0.0) for numbers in (got, reference, want)
        )
        reference = torch.where(reference.isfinite(), reference, want)
        allowed = 2 * (reference - want).norm() + floor * want.norm() + absolute
        allowed += slack * want.numel() ** 0.5
        assert (got - want).norm() <= allowed, f"{(got - want).norm():.2e} > {allowed:.2e}"
    return masks


@dataclasses.dataclass(frozen=True)
class OpTests:
    """The cases of an op that `test_every_op.py` checks.

    Attributes:
        compare: compares what a runner computes with what is right; takes a problem, a runner, the `near` of
            a case, and by `view` how tensors are passed.
        expected: the formulas, which take what the op takes, less the backend; see `assert_is`.
        close: how near to them the reference is.
        exact: cases in which the reference has the numbers of the formulas.
        kernels: cases for kernels, in the interpreter and on a GPU.
        everywhere: cases for the reference, too.
        halves: cases in 16 bits, which take the runner's type.
        strided: a case whose tensors and cotangents are passed with other strides, too.
        guarded: a case that may write no number past the end of its memory.
        empty: cases without tokens, whose gradients are zeros.
        on_gpus: as `kernels`, on a GPU only.
        random: draws such cases, for a GPU.
        library: yields the arguments of `opcheck` for the ops of traced graphs, on a device.
        wrapped: the modules of these ops, below `recsys.ops`.
    """

    compare: Callable[..., Any] = assert_near
    expected: Callable[..., Any] | None = None
    close: float = 1e-11
    exact: Sequence[Case] = ()
    kernels: Sequence[Case] = ()
    everywhere: Sequence[Case] = ()
    halves: Sequence[Callable[[torch.dtype], Case]] = ()
    strided: Case | None = None
    guarded: Case | None = None
    empty: Sequence[Case] = ()
    on_gpus: Sequence[Case] = ()
    random: Any = None
    library: Callable[[str], Iterator[tuple[Any, ...]]] | None = None
    wrapped: Sequence[str] = ()


# --- what else every backend must do -----------------------------------------------------------------------


@contextlib.contextmanager
def guarded_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """Within the block every buffer that PyTorch hands out uninitialised has a guard behind it. Afterwards
    the guards must be whole, and no number of the buffers may still be the guard's."""
    buffers: list[Tensor] = []
    new_empty = Tensor.new_empty

    def guarded(shape: Sequence[int], dtype: torch.dtype | None) -> Tensor:
        size = torch.Size(shape)
        buffers.append(torch.full((size.numel() + MARGIN,), GUARD, dtype=dtype))
        return buffers[-1][: size.numel()].view(size)

    def flat(shape: tuple[Any, ...]) -> Sequence[int]:
        return shape[0] if shape and not isinstance(shape[0], int) else shape

    def of_tensor(self: Tensor, *shape: Any, dtype=None, device=None) -> Tensor:
        if device is not None:  # the interpreter's own
            return new_empty(self, *shape, device=device)
        return guarded(flat(shape), dtype or self.dtype)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *shape, dtype=None, device=None: guarded(flat(shape), dtype))
        patch.setattr(
            torch, "empty_like", lambda like, dtype=None, **_: guarded(like.shape, dtype or like.dtype)
        )
        patch.setattr(Tensor, "new_empty", of_tensor)
        yield buffers
    assert buffers
    for buffer in buffers:
        assert (buffer[-MARGIN:] == GUARD).all() and not (buffer[:-MARGIN] == GUARD).any()


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Within the block waiting for the GPU is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def artefacts(*kernels: Any) -> list[int]:
    """The number of compiled forms that each Triton kernel has in this process."""
    return [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels]


def on_device(problem: Problem, runner: Runner) -> Problem:
    """The problem with all its tensors on the runner's device."""

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(entry) for entry in value]
        return value.to(runner.device) if isinstance(value, Tensor | SequenceLayout) else value

    tensors = {name: moved(tensor) for name, tensor in problem.tensors.items()}
    options = {name: moved(value) for name, value in problem.options.items()}
    return dataclasses.replace(problem, tensors=tensors, options=options)


def assert_nothing_waits(problem: Problem, runner: Runner) -> None:
    """Neither forward nor backward waits for the GPU, once the kernels are compiled."""
    problem = on_device(problem, runner)
    for attempt in range(2):
        with no_waiting() if attempt else contextlib.nullcontext():
            outputs, leaves = call(problem, runner)
            torch.autograd.grad(sum(out.sum() for out in outputs), leaves)


def assert_same_bits_of_one_artefact(problems: Sequence[Problem], runner: Runner, *kernels: Any) -> None:
    """Problems of different sizes, five, in rapid succession and any order: the same bits each time, and
    nothing is compiled anew."""
    problems = [on_device(problem, runner) for problem in problems]
    for problem in problems:
        results(problem, runner)
    expected, before = [results(problem, runner) for problem in problems], artefacts(*kernels)
    order = [index for n in range(40) for index in (4, n % 4, 0, 3, 1)]
    rapid = [(index, results(problems[index], runner)) for index in order]
    torch.cuda.synchronize()
    for index, got in rapid:
        assert_equal(got, expected[index])
    assert artefacts(*kernels) == before


def assert_compiles_once(
    problems: Sequence[Problem], runner: Runner, floor: float | None = None, backend: Any = "inductor"
) -> None:
    """One graph of `torch.compile` with dynamic sizes gives what eager mode gives for every problem, to
    PyTorch's tolerance. With `floor`, for an op whose compiled graph takes other kernels than eager mode, it
    is as near the numbers of float64 as `assert_as_near` asks of those kernels."""
    compiled = torch.compile(problems[0].function, dynamic=True, fullgraph=True, backend=backend)
    for problem in problems:
        ours = results(dataclasses.replace(problem, function=compiled), runner)
        if floor is None:
            for got, want in zip(ours, results(problem, runner), strict=True):
                torch.testing.assert_close(got, want)
        else:
            reference = Runner("reference", runner.device)
            theirs, exact = results(problem, reference), results(problem.cast(torch.float64), reference)
            assert_as_near(ours, theirs, exact, floor=floor)


def exported(model: torch.nn.Module, example: Sequence[Tensor | None]) -> torch.export.ExportedProgram:
    """The graph of a model whose tensors have a first dimension of any size."""
    sizes = tuple(None if tensor is None else {0: torch.export.Dim.AUTO} for tensor in example)
    with torch.no_grad(), fx_config.patch(backed_size_oblivious=True):
        return torch.export.export(model, tuple(example), dynamic_shapes=sizes)


def assert_serves(
    compiled: Callable[..., Any],
    model: torch.nn.Module,
    batches: Sequence[Sequence[Tensor | None]],
    **close: float,
) -> None:
    """Without gradients a graph gives what the model gives in eager mode, for batches of any size."""
    with torch.no_grad():
        for batch in batches:
            torch.testing.assert_close(compiled(*batch), model(*batch), **close)


def assert_trained_by_one_graph(
    model: torch.nn.Module,
    batches: Sequence[Sequence[Tensor | None]],
    leaves: Callable[..., list[Tensor]],
    **close: float,
) -> None:
    """One compiled graph, traced once, has the outputs and gradients of eager mode; `leaves` of a batch."""
    from torch._dynamo.testing import CompileCounterWithBackend  # takes seconds, which the interpreter spares

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for batch in batches:
        pairs = []
        for function in (compiled, model):
            made = function(*batch)
            outputs = [out for out in ([made] if isinstance(made, Tensor) else made) if out.requires_grad]
            pairs.append([*outputs, *gradients(outputs, leaves(*batch))])
        torch.testing.assert_close(*pairs, **close)
    assert counter.frame_count == 1


def assert_traced(
    function: Callable[..., Any], *arguments: Tensor, kernels: int, every: bool = False
) -> torch.fx.Graph:
    """A graph with symbolic sizes holds so many Triton kernels, the first of which, or every one,
    has a grid that depends on the sizes."""
    from torch._library.triton import set_wrap_triton_enabled
    from torch.fx.experimental.proxy_tensor import make_fx

    with set_wrap_triton_enabled(True):
        traced = make_fx(function, tracing_mode="symbolic")(*arguments)
    nodes = [node for node in traced.graph.nodes if "triton_kernel_wrapper" in str(node.target)]
    checked = nodes if every else nodes[:1]
    assert len(nodes) == kernels
    assert not any(isinstance(node.kwargs["grid"][0][0], int) for node in checked)
    return traced.graph


def opcheck(op: Any, arguments: tuple[Any, ...], *, differentiable: bool = False) -> None:
    """Checks the schema, shapes without numbers and, if asked for, registered gradients.

    In the interpreter `wrap_triton` of the op's module must have been replaced by `WithNumbersOnly`.
    """
    checks = ["test_schema", "test_faketensor", *(["test_autograd_registration"] * differentiable)]
    torch.library.opcheck(op, arguments, test_utils=checks)


def facts_of(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns the facts by which an op chooses a backend for a call."""
    with unittest.mock.patch.object(Op, "explain", lambda self, facts: facts):
        return explain(op, *args, **kwargs)


def refused(
    function: Callable[..., Any], arguments: Callable[..., dict[str, Any]], wrong: Sequence[Any]
) -> Any:
    """The test that wrong arguments are named: `wrong` has (changes, error, message), and
    `arguments(**changes)` what the function then takes."""

    @pytest.mark.parametrize(("changes", "error", "message"), wrong, ids=[message for *_, message in wrong])
    def test_wrong_arguments_are_named(changes, error, message):
        with pytest.raises(error, match=message):
            function(**arguments(**changes))

    return test_wrong_arguments_are_named
