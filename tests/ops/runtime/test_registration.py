"""The registration helper, with ops made up for it, in every way in which an op is called."""

import ast
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim

import recsys.ops
from recsys.ops.runtime import registration
from tests.tools.packaged import assert_packaged

ROOT = Path(__file__).resolve().parents[3]


def scaled(x: Tensor, y: Tensor, factor: float) -> Tensor:
    """[n, D], [n, V] -> [n, V]: not the shape of its first argument."""
    return x.sum(1, keepdim=True) * y * factor


def scaled_backward(grad: Tensor, x: Tensor, y: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    of_x = (grad * y).sum(1, keepdim=True) * factor
    return of_x.expand(x.shape).contiguous(), grad * x.sum(1, keepdim=True) * factor


def fake(x: Tensor, y: Tensor, factor: float) -> Tensor:
    return torch.empty_like(y)


def fake_backward(grad: Tensor, x: Tensor, y: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(y)


def made(op, backward_op):
    def backward(ctx, grad):
        return *backward_op(grad, *ctx.saved_tensors, *ctx.rest), None

    registration.differentiable(op, backward, registration.saving(2))
    return op


OPS = {
    "visible": made(
        registration.traceable_op("made_up_visible")(scaled),
        registration.traceable_op("made_up_visible_backward")(scaled_backward),
    ),
    "opaque": made(
        registration.opaque_op("made_up_opaque", scaled, fake, devices=("cpu",)),
        registration.opaque_op(
            "made_up_opaque_backward",
            scaled_backward,
            fake_backward,
        ),
    ),
}


class Model(torch.nn.Module):
    def __init__(self, op):
        super().__init__()
        self.op = op

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.op(x + 1, y, 0.5)


def batch(rows: int):
    generator = torch.Generator().manual_seed(rows)
    return tuple(torch.randn(rows, width, generator=generator).requires_grad_() for width in (3, 5))


def right(x, y):
    return (x + 1).sum(1, keepdim=True) * y / 2


@pytest.fixture(params=OPS)
def op(request):
    return OPS[request.param]


def check_gradients(call, rows: int) -> None:
    inputs, cotangent = batch(rows), torch.randn(rows, 5)
    grads = torch.autograd.grad(call(*inputs), inputs, cotangent)
    for got, want in zip(grads, torch.autograd.grad(right(*inputs), inputs, cotangent), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("rows", [0, 1, 4])
def test_eager_with_and_without_gradients(op, rows):
    check_gradients(Model(op), rows)
    with torch.no_grad():
        torch.testing.assert_close(Model(op)(*batch(rows)), right(*batch(rows)))
    torch.library.opcheck(op, (*batch(rows), 0.5))


def test_one_compiled_graph_for_all_sizes(op):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(Model(op), backend=counter, fullgraph=True, dynamic=True)
    for rows in (4, 2, 31):
        check_gradients(compiled, rows)
    assert counter.frame_count == 1


def exported(op):
    with torch.no_grad():
        program = torch.export.export(
            Model(op), batch(4), dynamic_shapes=({0: Dim("rows")}, {0: Dim("rows")})
        )
    nodes = [str(node.target) for node in program.graph.nodes if "made_up" in str(node.target)]
    assert len(nodes) == 1
    return program


def test_it_is_one_node_of_an_exported_graph(op):
    program = exported(op)
    with torch.no_grad():
        for rows in (4, 2, 31):
            torch.testing.assert_close(program.module()(*batch(rows)), right(*batch(rows)))


@pytest.mark.slow
def test_a_package_needs_nothing_of_this_and_runs_in_four_threads(tmp_path):
    batches = [[tensor.detach() for tensor in batch(rows)] for rows in (4, 2, 31)]
    assert_packaged(exported(OPS["visible"]), right, batches, tmp_path)


def test_nobody_registers_an_op_elsewhere():
    ways = re.compile(r"\b(triton_op|custom_op|register_autograd|register_fake|library\.(define|impl))\b")
    users = {path for path in (ROOT / "recsys").rglob("*.py") if ways.search(path.read_text())}
    assert users == {ROOT / "recsys" / "ops" / "runtime" / "registration.py"}


def test_a_function_takes_at_most_eight_parameters():
    """But for kernels, and for what users call by name with the function that checks its arguments."""
    for path in (ROOT / "recsys" / "ops").rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef) or "jit" in map_names(function.decorator_list):
                continue
            given = function.args
            count = len([*given.posonlyargs, *given.args, *given.kwonlyargs]) - (function.name == "forward")
            public = hasattr(recsys.ops, function.name) or function.name == "linear_logp_sharded"
            assert count <= 8 or public or function.name.endswith("_facts"), f"{path}: {function.name}"


def map_names(decorators: list[ast.expr]) -> set[str]:
    """The attributes that decorators name, such as jit of triton.jit."""
    return {
        node.attr
        for decorator in decorators
        for node in ast.walk(decorator)
        if isinstance(node, ast.Attribute)
    }
