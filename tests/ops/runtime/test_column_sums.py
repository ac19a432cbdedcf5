"""`LinearAdd`, the projection and residual sum within the fused STU layer, against float64."""

import pytest
import torch

from tests.ops.harness import assert_as_near, gradients, interpreter_test, normal, runners


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
@pytest.mark.parametrize("rows", [0, 1, 70, pytest.param(5000, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("types", ["float32", "mixed", "half"])
def test_the_sum_and_all_gradients(types, rows, with_bias, runner):
    from recsys.ops.runtime.column_sums import LinearAdd

    x, y = normal(rows, 20, seed=20), normal(rows, 9, seed=9)
    x = x.to(runner.half if types == "half" else torch.float32)
    given = [x, y.to(torch.float32 if types == "float32" else runner.half), normal(20, 9).float()]
    given += [normal(20).float()] * with_bias

    def fused(x, y, weight, bias=None):
        return LinearAdd.apply(x, y, weight, bias)

    ours, theirs = (results(runner, given, function) for function in (fused, plain))
    exact = results(runner, [tensor.double() for tensor in given], plain)
    assert_as_near(ours, theirs, exact)


test_in_the_interpreter = interpreter_test(__file__)
