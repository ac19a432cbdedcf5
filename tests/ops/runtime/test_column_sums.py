"""`LinearAdd`, the projection and residual sum within the fused STU layer, against float64."""

import pytest
import torch

from tests.ops.harness import gradients, interpreter_test, normal, runners


def results(runner, given, function):
    leaves = [tensor.to(runner.device).requires_grad_() for tensor in given]
    out = function(*leaves)
    return [out.detach(), *gradients([out], leaves)]


def plain(x, y, weight, bias=None):
    """PyTorch's operations: the product in the type of y, the sum in that of x."""
    branch = torch.nn.functional.linear(y, weight.to(y.dtype), None if bias is None else bias.to(y.dtype))
    return x + branch.to(x.dtype)


@pytest.mark.parametrize("runner", runners("triton"))
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 70, 5000])
@pytest.mark.parametrize("types", ["float32", "mixed", "half"])
def test_the_sum_and_all_gradients(types, rows, with_bias, runner):
    if runner.is_interpreted and rows > 1000:
        pytest.skip("for a GPU")
    from recsys.ops.runtime.column_sums import LinearAdd

    kinds = {
        "float32": (torch.float32,) * 2,
        "mixed": (torch.float32, runner.half),
        "half": (runner.half,) * 2,
    }
    x, y = (
        normal(rows, width, seed=width).to(kind) for width, kind in zip((20, 9), kinds[types], strict=True)
    )
    given = [x, y, normal(20, 9).float(), normal(20).float() if with_bias else None]
    given = [tensor for tensor in given if tensor is not None]

    def fused(x, y, weight, bias=None):
        return LinearAdd.apply(x, y, weight, bias)

    ours, theirs = results(runner, given, fused), results(runner, given, plain)
    exact = results(runner, [tensor.double() for tensor in given], plain)
    for got, reference, want in zip(ours, theirs, exact, strict=True):
        assert got.dtype == reference.dtype
        allowed = 2 * (reference.double() - want).norm() + 1e-6 * want.norm()
        assert (got.double() - want).norm() <= allowed


test_in_the_interpreter = interpreter_test(__file__)
