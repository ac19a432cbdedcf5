import gc

import pytest
import torch

from recsys.modules.recompute import rebuilt_in_backward
from tests.modules.memory import Allocations


class Step:
    """(x W)[:, :3] * tanh((x W)[:, 2:]), with the product made again in backward."""

    def __init__(self, rows=4):
        self.x = torch.randn(rows, 6, dtype=torch.float64, requires_grad=True)
        self.weight = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
        self.calls = 0

    def make(self):
        self.calls += 1
        assert not torch.is_grad_enabled()
        return [self.x.detach() @ self.weight]

    def plain(self):
        return self.readers(self.x @ self.weight)

    def readers(self, product):
        return product[:, :3] * product[:, 2:].tanh()

    def rebuilt(self):
        product = self.x @ self.weight
        with rebuilt_in_backward(self.make, "cpu") as watch:
            watch([product])
            return self.readers(product)

    def gradients(self, output):
        cotangent = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(3))
        return torch.autograd.grad(output, [self.x, self.weight], cotangent)


@pytest.mark.parametrize("rows", [4, 1, 0])
def test_gradients_are_those_of_what_was_not_kept(rows):
    step = Step(rows)
    expected = step.gradients(step.plain())
    for got, want in zip(step.gradients(step.rebuilt()), expected, strict=True):
        assert torch.equal(got, want)


def test_it_is_made_once_and_only_by_a_backward_pass():
    step = Step()
    output = step.rebuilt()
    assert step.calls == 0
    step.gradients(output)
    assert step.calls == 1


def test_only_what_is_watched_is_left_out_and_everything_is_freed():
    step = Step(rows=100)
    gc.disable()  # nothing may need it to go away
    try:
        kept = {}
        for name, forward in (("plain", step.plain), ("rebuilt", step.rebuilt)):
            forward()  # what PyTorch caches at a first call
            with Allocations() as allocations:
                output = forward()
            kept[name] = allocations.alive()
            step.gradients(output)
            del output
            assert allocations.alive() == 0
    finally:
        gc.enable()
    numbers = 8 * 100
    # The output, tanh's result (for its own gradient and for the product's), the product.
    assert kept == {"plain": numbers * (3 + 3 + 5), "rebuilt": numbers * (3 + 3)}


def test_a_graph_can_be_used_twice():
    step = Step()
    output = step.rebuilt()
    cotangent = torch.randn_like(output)
    first = torch.autograd.grad(output, [step.x, step.weight], cotangent, retain_graph=True)
    second = torch.autograd.grad(output, [step.x, step.weight], cotangent)
    assert all(torch.equal(got, want) for got, want in zip(first, second, strict=True))


def test_it_is_made_in_the_autocast_state_of_the_forward_pass():
    step = Step()
    for tensor in (step.x, step.weight):
        tensor.data = tensor.data.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain, rebuilt = step.plain(), step.rebuilt()
    assert rebuilt.dtype == torch.bfloat16
    for got, want in zip(step.gradients(rebuilt), step.gradients(plain), strict=True):
        assert torch.equal(got, want)


def test_tensors_of_other_types_in_the_same_storage_are_kept():
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    with rebuilt_in_backward(lambda: [x.detach() * 2], "cpu") as watch:
        doubled = x * 2
        watch([doubled])
        bits = doubled.detach().view(torch.int64)
        output = doubled * (bits & 1)
    (gradient,) = torch.autograd.grad(output.sum(), x)
    assert gradient.tolist() == [2 * (bit & 1) for bit in bits.tolist()]
