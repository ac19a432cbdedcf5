"""Every synchronisation statement of the Hopper kernels has a case in which the emulator notices its absence.

Each statement is removed once from the forward kernel and from the backward kernel of one pass. The emulator
must fail then: with a race, a deadlock, a barrier that is used wrongly, or wrong numbers.
"""

import functools
import itertools

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")

from recsys.ops import AttentionMask
from recsys.ops.hstu_attention.hopper import backward, forward
from recsys.ops.hstu_attention.problem import Problem
from recsys.ops.runtime import hopper_launch
from tests.ops.cases import layout_of, samples
from tests.ops.hstu_attention.emulated import inputs, results
from tests.tools.gluon_emulator import Emulated
from tests.tools.mutations import mutations

pytestmark = pytest.mark.slow

FORWARD, BACKWARD = forward.forward_kernel, backward.backward_kernel

LAYOUTS = {
    "mixed": layout_of(samples(2, [(300, 5), (3, 0), (130, 60), (0, 0), (230, 0), (1, 1), (2, 0), (5, 5)])),
    "two tiles": layout_of(samples(0, [(20, 0), (30, 0)])),
    "two blocks": layout_of(samples(0, [(100, 0)])),
}
MASKS = (AttentionMask(window=100, prefix=10), AttentionMask())

FORWARD_SIZES = [
    (64, forward.ForwardSizes(64, stages, strips, held, 160, 24, q_tiles))
    for stages, strips, q_tiles in ((2, 2, 2), (3, 3, 2), (2, 3, 1), (2, 2, 1))
    for held in (True, False)
]
BACKWARD_SIZES = [
    (64, backward.BackwardSizes(64, 2, 1, 240, 24)),
    (64, backward.BackwardSizes(64, 4, 2, 240, 24)),
    (128, backward.BackwardSizes(64, 2, 1, 240, 24)),
]

NOT_NEEDED = {
    "pass_rows: mbarrier.wait(q_full.index(stage), parity)": (
        "the first strip passes no rows, waits for these, and then signals that its half of dS is full; "
        "the second one awaits this before the buffer's next use"
    ),
    "pass_rows: mbarrier.wait(g_full.index(stage), parity)": "as for q_full",
}
"""Redundant statements by function and text, with the reason."""


@functools.cache
def case(name, mask, dim):
    """q, k, v and a cotangent, and in float64 the output and the gradients of q, k and v."""
    layout = LAYOUTS[name]
    *tensors, cotangent = inputs(layout.total_len, dim)
    exact = results(layout, mask, (*tensors, cotangent), torch.float64)
    return Problem(layout, mask, dim**-0.5, 50.0, None), tensors, cotangent, exact


def assert_near(ours, exact):
    error = (ours.double() - exact).norm() / exact.norm()
    assert ours.isfinite().all() and error < 0.02, float(error)


def run_forward(monkeypatch, codes):
    monkeypatch.setattr(forward, "forward_kernel", Emulated(FORWARD, codes))
    for name, mask, (dim, sizes) in itertools.product(LAYOUTS, MASKS, FORWARD_SIZES):
        problem, tensors, _, exact = case(name, mask, dim)
        assert_near(forward.forward(*tensors, problem, sizes), exact[0])


def run_backward(monkeypatch, codes):
    monkeypatch.setattr(backward, "backward_kernel", Emulated(BACKWARD, codes))
    for name, mask, (dim, sizes) in itertools.product(LAYOUTS, MASKS, BACKWARD_SIZES):
        problem, tensors, cotangent, exact = case(name, mask, dim)
        grads = backward.backward(cotangent, *tensors, problem, sizes)[:3]
        for ours, right in zip(grads, exact[1:], strict=True):
            assert_near(ours, right)


@pytest.mark.parametrize(
    ("kernel", "run"),
    [(FORWARD, run_forward), (BACKWARD, run_backward)],
    ids=["forward", "backward"],
)
def test_a_missing_statement_is_noticed(kernel, run, monkeypatch):
    monkeypatch.setattr(hopper_launch, "num_processors", lambda device: 1)
    run(monkeypatch, {})
    unnoticed = set()
    for mutation in mutations(kernel):
        try:
            run(monkeypatch, {mutation.function: mutation.code})
        except AssertionError:
            continue
        unnoticed.add(mutation.name)
    assert unnoticed == {name for name in NOT_NEEDED if name in {m.name for m in mutations(kernel)}}
