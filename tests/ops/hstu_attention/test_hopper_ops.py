"""The Hopper kernels as ops of traced graphs, on a CPU: the kernels themselves run in the emulator."""

import subprocess
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")

from recsys.ops import AttentionMask, SequenceLayout, hstu_attention
from recsys.ops.hstu_attention import OP, hopper, supports_sm90
from recsys.ops.hstu_attention.hopper import backward, two_pass
from recsys.ops.hstu_attention.problem import Problem
from recsys.ops.runtime import triton_support
from recsys.ops.runtime.dispatch import Support
from tests.ops import harness
from tests.ops.cases import layout_of, samples
from tests.ops.hstu_attention.emulated import inputs, results

OPS = {"hstu_attention_sm90": hopper._run, "hstu_attention_sm90_backward": hopper._run_backward}


@pytest.fixture(autouse=True)
def on_a_cpu(emulated):
    with torch.library._scoped_library("recsys", "IMPL") as library:
        for name, kernel in OPS.items():
            library.impl(name, kernel, "CPU")
        yield


def arguments():
    layout = layout_of(samples(2, [(90, 7), (0, 0), (20, 3)]))
    problem = Problem(layout, AttentionMask(window=30, prefix=5), 64**-0.5, 50.0, None)
    return layout, inputs(layout.total_len, heads=2), problem


def test_the_op_has_the_gradients_of_the_kernels():
    layout, tensors, problem = arguments()
    leaves = [tensor.clone().requires_grad_() for tensor in tensors[:3]]
    out = hopper.call_op(*leaves, replace(problem, deterministic=True))
    got = [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]
    theirs, exact = (
        results(layout, problem.mask, tensors, dtype) for dtype in (torch.bfloat16, torch.float64)
    )
    harness.assert_as_near(got, theirs, exact, floor=1e-3)


@pytest.mark.parametrize(
    ("length", "batch", "window", "dim", "deterministic", "passes"),
    [
        (16384, 1, None, 128, False, 1),
        (16384, 1, None, 128, True, 2),
        (16384, 1, None, 256, False, 2),
        (16384, 1, 256, 128, False, 2),
        (16384, 1, 512, 128, False, 1),
        (16384, 1, 64, 64, False, 2),
        (16384, 1, 256, 64, False, 1),
        (1024, 4, None, 128, False, 2),
        (2048, 4, None, 128, False, 1),
        (512, 4, None, 64, False, 1),
        (256, 9, None, 64, False, 2),
        (0, 0, None, 64, False, 2),
    ],
)
def test_gradients_come_in_one_pass_where_rows_see_many_keys(
    length, batch, window, dim, deterministic, passes, monkeypatch
):
    taken = []
    for number, module in ((1, backward), (2, two_pass)):
        monkeypatch.setattr(module, "backward", lambda *_args, number=number, **_rest: taken.append(number))
    layout = SequenceLayout(torch.full((batch,), length))
    problem = Problem(layout, AttentionMask(window=window), 1.0, 1.0, deterministic=deterministic)
    q = torch.empty(layout.total_len, 1, dim, device="meta")
    hopper._gradients(q, q, q, q, problem, captured=False)
    assert taken == [passes]


def test_shapes_without_running():
    _, tensors, problem = arguments()
    layout, mask = problem.layout, problem.mask
    sizes = (layout.lengths, layout.offsets, layout.num_targets)
    rest = (*sizes, *[None] * 4, 2, mask.window, mask.prefix, False, 1, True)
    q, k, v, cotangent = tensors
    for name, first in (("hstu_attention_sm90", ()), ("hstu_attention_sm90_backward", (cotangent,))):
        op = getattr(torch.ops.recsys, name).default
        harness.opcheck(op, (*first, q, k, v, *rest, 0.125, 50.0, True))


def test_a_compiler_finds_one_node_and_no_questions_to_the_machine(monkeypatch):
    """The choice of the backend is traced too: what asks the machine must not be looked into."""

    def asked():
        subprocess.run(["true"], check=True)  # nothing that could be traced
        return ""

    seen = []
    answers = {"sm90": lambda facts: supports_sm90(replace(facts, device="cuda"))}
    monkeypatch.setattr(OP, "_kernel_supports", OP._kernel_supports | answers)
    monkeypatch.setattr(triton_support, "support", lambda device, dtype: Support(True))
    monkeypatch.setattr(triton_support, "_looked_for_hopper", asked)
    monkeypatch.setitem(triton_support._MODULES, hopper.__name__, hopper)

    def attend(q, k, v, lengths, offsets, num_targets):
        layout = SequenceLayout.trusted(lengths, offsets, num_targets, 2, q.shape[0], q.shape[0], q.shape[0])
        return hstu_attention(q, k, v, layout, scale_len=64, backend="sm90") * 2.0

    def graph(module, _inputs):
        seen.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return module.forward

    layout, tensors, _ = arguments()
    batch = (*tensors[:3], layout.lengths, layout.offsets, layout.num_targets)
    got = torch.compile(attend, dynamic=True, fullgraph=True, backend=graph)(*batch)
    assert sum("hstu_attention_sm90" in name for name in seen) == 1
    torch.testing.assert_close(got, attend(*batch))
