"""Triton kernels of `linear_attention` against float64: in the interpreter (small chunks) and on a GPU."""

import pytest
import torch
from torch.nn import functional as F

from recsys.ops import SequenceLayout, linear_attention
from tests.ops import harness
from tests.ops.harness import Problem, Runner, assert_near, normal, results, runners, shrink
from tests.tools.interpreter import INTERPRETED, WithNumbersOnly, interpreted

HEADS = 2
RAGGED = [(37, 3), (0, 2), (16, 0), (5, 20), (0, 0)]
LONG = [(700, 64), (1, 0), (2500, 5), (64, 1)]
ON_GPU = Runner("triton", "cuda")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    if INTERPRETED:
        from recsys.ops.linear_attention import triton_ops

        shrink(monkeypatch, triton_ops, CHUNK=16, COLUMNS=16, SHORTEST_SEGMENT=1)


def layout_of(shapes, contextual=1) -> SequenceLayout:
    counts = torch.tensor(shapes).reshape(-1, 2)
    return SequenceLayout(counts.sum(1) + contextual, counts[:, 1].contiguous(), contextual)


def problem(shapes, dims, *, per_head=False, delta=False, strength=1.0) -> Problem:
    """Decays of up to `strength`; keys of length 1 for the delta rule."""
    layout, (dim, v_dim) = layout_of(shapes), dims
    rows = layout.total_len
    decay = -strength * torch.rand(rows, HEADS, *([] if per_head else [dim]), dtype=torch.float64)
    tensors = {
        "q": normal(rows, HEADS, dim),
        "k": normal(rows, HEADS, dim, seed=1),
        "v": normal(rows, HEADS, v_dim, seed=2),
        "log_decay": decay,
        "initial_state": normal(len(shapes), HEADS, dim, v_dim, seed=3),
    }
    if delta:
        tensors["k"] = F.normalize(tensors["k"], dim=-1)
        tensors["beta"] = torch.rand(rows, HEADS, dtype=torch.float64)

    moved = {}

    def function(**arguments):
        device = arguments["q"].device
        if device not in moved:  # a copy to a GPU waits for it
            moved[device] = layout.to(device)
        return tuple(linear_attention(layout=moved[device], **arguments))

    return Problem("linear_attention", function, tensors)


FORMS = [
    pytest.param({"per_head": per_head, "delta": delta}, id=f"{decay} decay{', delta rule' * delta}")
    for per_head, decay in ((False, "channel"), (True, "head"))
    for delta in (False, True)
]


@pytest.mark.parametrize("runner", runners("triton"))
@pytest.mark.parametrize("form", FORMS)
def test_outputs_states_and_all_gradients(form, runner):
    """Chunks and segments that are full, partial and missing, widths that are no powers of two."""
    shapes = RAGGED if runner.is_interpreted else LONG
    narrow = problem(shapes, (5, 18), **form).cast(torch.float32)
    assert_near(narrow, runner, close=1e-5, floor=1e-5)


@pytest.mark.parametrize("runner", runners("triton"))
@pytest.mark.parametrize("form", [FORMS[0], FORMS[3]])
def test_columns_in_more_blocks_of_keys_than_of_values(form, runner):
    """One sample, so that with the delta rule a program carries few columns of its state."""
    narrow = problem([(70, 2)], (70, 33) if runner.device == "cuda" else (33, 5), **form)
    assert_near(narrow.cast(torch.float32), runner, close=1e-5, floor=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (32, 96)])
def test_bfloat16_on_a_gpu(dims, form):
    """Products take bfloat16, so an error may be that of three roundings."""
    narrow = problem(LONG, dims, **form).cast(
        torch.bfloat16, log_decay=torch.float32, initial_state=torch.float32, beta=torch.float32
    )
    assert_near(narrow, ON_GPU, floor=6e-3)


@pytest.mark.parametrize("runner", runners("triton"))
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("strength", [12.0, 40.0, 300.0])
def test_strong_decays(strength, delta, runner):
    """A chunk of the interpreter's is cut into four blocks with decays to -12 and fully with stronger ones.

    exp of a negated sum would be infinite: exp(20 * 16). Among decays to -300 few are weak enough to count,
    and a difference of sums in float32 would have lost them.
    """
    narrow = problem([(40, 2)], (16, 16), delta=delta, strength=strength).cast(torch.float32)
    assert_near(narrow, runner, close=1e-5, floor=1e-5)


@pytest.mark.parametrize("runner", runners("triton"))
def test_float16(runner):
    """Factors stay below 65,504, though a chunk decays by more than that."""
    wide = dict.fromkeys(("log_decay", "initial_state"), torch.float32)
    given = problem([(37, 3)], (16, 18), strength=8.0).cast(torch.float16, **wide)
    assert_near(given, runner, floor=2e-3)


@pytest.mark.parametrize("runner", runners("triton"))
@pytest.mark.parametrize("form", [FORMS[0], FORMS[3]])
def test_a_decay_of_nothing_has_no_gradient(form, runner):
    """The first decay of a sample meets a state of zeros: in its gradient all pairs of tokens cancel, however
    their factors have been rounded."""
    given = problem([(37, 3)], (16, 16), strength=0.5, **form)
    given.tensors["initial_state"].zero_()
    wide = dict.fromkeys(("log_decay", "initial_state", "beta"), torch.float32)
    found = results(given.cast(runner.half, **wide), runner)
    of_decays = found[2 + list(given.tensors).index("log_decay")]
    assert of_decays.abs().max() > 1 and of_decays[0].abs().max() < 1e-4


@interpreted
@pytest.mark.parametrize("delta", [False, True])
def test_the_ops_of_traced_graphs(delta, monkeypatch):
    """Schema, shapes without numbers and registered gradients; the numbers are those of the reference."""
    from recsys.ops.linear_attention import Inputs, reference, triton_ops

    monkeypatch.setattr(triton_ops, "wrap_triton", WithNumbersOnly)
    layout = layout_of([(20, 2), (3, 0)])
    tensors = problem([(20, 2), (3, 0)], (16, 16), delta=delta).cast(torch.float32).tensors
    leaves = [tensors[name].requires_grad_() if name in tensors else None for name in Inputs._fields]
    facts = (layout.lengths, layout.offsets, layout.num_targets, 0.5)
    arguments = (*leaves, *facts)
    harness.opcheck(triton_ops.linear_attention_triton, arguments, differentiable=True)
    wanted = reference.run(Inputs(*leaves), layout, 0.5)
    outputs = triton_ops.linear_attention_triton(*arguments)
    present = [leaf for leaf in leaves if leaf is not None]
    harness.assert_close(outputs, wanted, 1e-5)
    harness.assert_close(*(harness.gradients(results, present) for results in (outputs, wanted)), 1e-5)


@pytest.mark.gpu
def test_small_and_big_batches_share_one_artefact():
    """Two widths in turn, then five sizes in rapid succession: the same bits, nothing is compiled anew."""
    from recsys.ops.linear_attention import triton_chunks, triton_scan

    other = problem(RAGGED, (32, 32)).cast(torch.bfloat16)
    sizes = [[(5, 0)], [(700, 3)], [(64, 64), (63, 1)], [(2000, 0), (1, 1)], [(30, 2)] * 7]
    problems = [problem(size, (64, 64)).cast(torch.bfloat16) for size in sizes]
    before = [results(problems[1], ON_GPU), results(other, ON_GPU)]
    after = [results(problems[1], ON_GPU), results(other, ON_GPU)]
    for first, second in zip(before, after, strict=True):
        harness.assert_equal(first, second)
    kernels = (triton_scan.states_kernel, triton_scan.state_gradients_kernel, triton_chunks.gradients_kernel)
    harness.assert_same_bits_of_one_artefact(problems, ON_GPU, *kernels)


@pytest.mark.gpu
@pytest.mark.parametrize("delta", [False, True])
def test_nothing_waits_for_the_gpu(delta):
    harness.assert_nothing_waits(problem([(64, 5)], (64, 64), delta=delta).cast(torch.bfloat16), ON_GPU)


test_in_the_interpreter = harness.interpreter_test(__file__)
