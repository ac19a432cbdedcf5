"""`linear_attention` on every backend: the reference against the recurrence, token by token, kernels against
float64, in the interpreter with small chunks."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.export import Dim
from torch.fx.experimental import _config as fx_config
from torch.nn import functional as F

from recsys.ops import SequenceLayout, linear_attention, offsets_from_lengths
from recsys.ops.linear_attention import Inputs, reference
from recsys.ops.linear_attention.chunks import chunk_table
from tests.ops import harness
from tests.ops.cases import layout_of, samples
from tests.ops.harness import (
    REFERENCE,
    Case,
    OpTests,
    Problem,
    Runner,
    assert_is,
    gradients,
    normal,
    results,
    runners,
)

HEADS, DIM, V_DIM = 2, 3, 5
RAGGED = [(35, 2), (0, 3), (15, 0), (0, 0)]
LONG = [(700, 64), (1, 0), (2500, 5), (64, 1)]
ON_GPU = Runner("triton", "cuda")
SMALL = {"linear_attention.triton_launch": {"CHUNK": 16, "COLUMNS": 16, "SHORTEST_SEGMENT": 1}}
WIDE = dict.fromkeys(("log_decay", "initial_state", "beta"), torch.float32)
"""Types beside tokens of 16 bits."""


def attend(q, k, v, log_decay, initial_state, layout, backend="auto", **rest):
    return tuple(
        linear_attention(q, k, v, log_decay, layout, initial_state=initial_state, backend=backend, **rest)
    )


def problem(shapes, dims=(DIM, V_DIM), contextual=1, *, per_head=False, delta=False, strength=1.0) -> Problem:
    """Decays of up to `strength`; keys of length 1 for the delta rule."""
    layout, (dim, v_dim) = layout_of(samples(contextual, shapes)), dims
    rows, generator = layout.total_len, torch.Generator().manual_seed(len(shapes))
    shape = (rows, HEADS) if per_head else (rows, HEADS, dim)
    decay = -strength * torch.rand(shape, generator=generator, dtype=torch.float64)
    tensors = {
        "q": normal(rows, HEADS, dim),
        "k": normal(rows, HEADS, dim, seed=1),
        "v": normal(rows, HEADS, v_dim, seed=2),
        "log_decay": decay,
        "initial_state": normal(len(shapes), HEADS, dim, v_dim, seed=3),
    }
    if delta:
        tensors["k"] = F.normalize(tensors["k"], dim=-1)
        tensors["beta"] = torch.rand(rows, HEADS, generator=generator, dtype=torch.float64)
    return Problem("linear_attention", attend, tensors, {"layout": layout})


def by_hand(q, k, v, log_decay, initial_state, layout, scale=None, beta=None):
    """The formulas, one token and head at a time."""
    out, final, scale = [None] * layout.total_len, [], q.shape[2] ** -0.5 if scale is None else scale
    decays = log_decay if log_decay.dim() == 3 else log_decay[:, :, None].expand(q.shape)
    for sample, (start, end) in enumerate(pairwise(layout.offsets.tolist())):
        first_target = end - int(layout.num_targets[sample])
        states = [initial_state[sample, head] for head in range(HEADS)]
        for row in range(start, end):
            rows = []
            for head in range(HEADS):
                decayed = decays[row, head].exp()[:, None] * states[head]
                key, value = k[row, head], v[row, head]
                if beta is None:
                    state = decayed + torch.outer(key, value)
                else:
                    replaced = torch.eye(len(key), dtype=key.dtype) - beta[row, head] * torch.outer(key, key)
                    state = replaced @ decayed + beta[row, head] * torch.outer(key, value)
                rows.append(scale * (state.T @ q[row, head]))
                if row < first_target:
                    states[head] = state
            out[row] = torch.stack(rows)
        final.append(torch.stack(states))
    return torch.stack(out), torch.stack(final)


FORMS = [{"per_head": per_head, "delta": delta} for per_head in (False, True) for delta in (False, True)]


def narrow(shapes, dims, dtype=torch.float32, **form) -> Problem:
    """A problem for kernels; beside tokens of 16 bits decays and states are of 32."""
    return problem(shapes, dims, **form).cast(dtype, **(WIDE if dtype.itemsize == 2 else {}))


def scaled(shapes, contextual, scale=0.7, **form) -> Problem:
    return problem(shapes, contextual=contextual, **form).with_options(scale=scale)


def library(device):
    """The numbers are those of the reference."""
    from recsys.ops.linear_attention import triton as triton_ops

    for delta in (False, True):
        given = harness.on_device(narrow([(17, 1), (3, 0)], (5, 18), delta=delta), Runner("triton", device))
        layout, tensors = given.options["layout"], given.tensors
        leaves = [tensors[name].requires_grad_() if name in tensors else None for name in Inputs._fields]
        arguments = (*leaves, layout.lengths, layout.offsets, layout.num_targets, 0.5)
        yield triton_ops.linear_attention_triton, arguments, True
        wanted = reference.run(Inputs(*leaves), layout, 0.5)
        outputs = triton_ops.linear_attention_triton(*arguments)
        present = [leaf for leaf in leaves if leaf is not None]
        harness.assert_close(outputs, wanted, 1e-5)
        harness.assert_close(*(gradients(results, present) for results in (outputs, wanted)), 1e-5)


NEAR = {"close": 1e-5, "floor": 1e-5}
# One sample, so that with the delta rule a program carries few columns of its state, in more blocks of keys
# than of values.
COLUMNS = [FORMS[0], FORMS[3]]
TESTS = OpTests(
    expected=by_hand,
    exact=[
        Case(scaled, shapes, contextual, **form)
        for contextual, shapes in ((0, [(0, 4)]), (1, [(1, 0)]), (3, [(5, 2), (0, 3), (40, 0), (0, 0)]))
        for form in FORMS[:2]
    ]
    + [Case(scaled, [(16, 1), (17, 0), (33, 2)], n, **form) for n, form in enumerate(FORMS[:2])]
    + [Case(scaled, [(20, 2), (3, 1)], 1, scale, per_head=True) for scale in (None, 0.0)],
    # Chunks and segments that are full, partial and missing, widths that are no powers of two. The other two
    # forms have them in `library`, whose numbers are compared, too.
    kernels=[Case(narrow, RAGGED, (5, 18), **form, near=NEAR) for form in FORMS if form["per_head"]]
    + [Case(narrow, [(20, 2)], (33, 5), **form, near=NEAR) for form in COLUMNS]
    # A chunk of the interpreter's is cut into four blocks with decays to -12 and fully with stronger ones.
    # The exponential of a negated sum would be infinite: exp(20 * 16). Among decays to -300 few are weak
    # enough to count, and a difference of sums in float32 would have lost them.
    + [
        Case(narrow, [(20, 2)], (16, 16), delta=delta, strength=strength, near=NEAR)
        for strength, delta in ((12.0, False), (12.0, True), (300.0, False), (300.0, True))
    ]
    # Factors stay below 65,504, though a chunk decays by more than that.
    + [Case(narrow, [(37, 3)], (16, 18), torch.float16, strength=8.0, near={"floor": 2e-3})],
    # Products take bfloat16, so an error may be that of three roundings.
    on_gpus=[Case(narrow, LONG, (5, 18), **form, near=NEAR) for form in FORMS]
    + [Case(narrow, [(70, 2)], (70, 33), **form, near=NEAR) for form in COLUMNS]
    + [
        Case(narrow, LONG, dims, torch.bfloat16, **form, near={"floor": 6e-3})
        for dims in ((64, 64), (128, 128), (32, 96))
        for form in FORMS
    ],
    library=library,
    wrapped=["linear_attention.triton"],
)


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), max_size=4), st.integers(0, 2))
def test_random_layouts(shapes, contextual):
    if shapes and contextual + sum(map(sum, shapes)):
        assert_is(problem(shapes, contextual=contextual), by_hand, close=1e-10)


@pytest.mark.parametrize("shapes", [[], [(0, 0), (0, 0)]])
def test_a_batch_without_tokens(shapes):
    given = problem(shapes, contextual=0)
    (out, final), leaves = harness.call(given, REFERENCE)
    state = given.tensors["initial_state"]
    assert out.shape == (0, HEADS, V_DIM) and torch.equal(final, state)
    of_q, *_, of_state = torch.autograd.grad(out.sum() + final.sum(), leaves)
    assert not of_q.any() and (of_state == 1).all()


def test_a_history_in_two_calls_is_one_history():
    given, cut = problem([(30, 0), (25, 0)], contextual=0), [13, 0]
    mask = torch.cat([torch.arange(n) < c for n, c in zip((30, 25), cut, strict=True)])
    tensors = dict(given.tensors)
    whole, state, parts = attend(**tensors, **given.options), tensors.pop("initial_state"), []
    for chosen, lengths in ((mask, cut), (~mask, [17, 25])):
        part = SequenceLayout(torch.tensor(lengths))
        rows = {name: tensor[chosen] for name, tensor in tensors.items()}
        out, state = attend(**rows, initial_state=state, layout=part)
        parts.append(out)
    harness.assert_close([*parts, state], [whole[0][mask], whole[0][~mask], whole[1]], 1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_types_are_summed_in_float32(dtype):
    narrow = problem([(100, 3), (7, 0)]).cast(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, final = attend(**narrow.tensors, **narrow.options)
    exact = attend(**narrow.cast(torch.float64).tensors, **narrow.options)
    assert out.dtype == dtype and final.dtype == torch.float32
    harness.assert_close([final], exact[1:], 1e-5)
    harness.assert_close([out], exact[:1], 2**-8 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("runner", runners("triton"))
@pytest.mark.parametrize("form", [FORMS[0], FORMS[3]])
def test_a_decay_of_nothing_has_no_gradient(form, runner):
    """The first decay of a sample meets a state of zeros: in its gradient all pairs of tokens cancel, however
    their factors have been rounded."""
    given = problem([(20, 3)], (16, 16), strength=0.5, **form)
    given.tensors["initial_state"].zero_()
    values = results(given.cast(runner.half, **WIDE), runner)
    of_decays = values[2 + list(given.tensors).index("log_decay")]
    assert of_decays.abs().max() > 1 and of_decays[0].abs().max() < 1e-4


@pytest.mark.gpu
def test_another_width_in_between_changes_nothing():
    first, narrower = (problem(RAGGED, dims).cast(torch.bfloat16) for dims in ((64, 64), (32, 32)))
    before, _, after = (results(given, ON_GPU) for given in (first, narrower, first))
    harness.assert_equal(before, after)


class Model(torch.nn.Module):
    def forward(
        self, q, k, v, log_decay, state, beta, lengths, num_targets, steps, targets
    ) -> tuple[Tensor, Tensor]:
        sizes = (q.shape[0], steps.shape[0] + 2, targets.shape[0])
        layout = SequenceLayout.trusted(lengths, offsets_from_lengths(lengths), num_targets, 1, *sizes)
        return tuple(linear_attention(q, k, v, log_decay, layout, beta=beta, initial_state=state))


# No size of the first is another's, or a compiler takes them for the same.
BATCHES = [[(5, 2), (30, 3), (0, 1), (7, 0)], [(2, 0), (1, 3)], [(40, 1), (0, 0), (18, 1)]]


def given_to(shapes, delta=False):
    """The arguments of the model."""
    made = problem(shapes, delta=delta).cast(torch.float32)
    leaves = [tensor.requires_grad_() for tensor in made.tensors.values()]
    layout, beta = made.options["layout"], [] if delta else [None]
    steps, targets = torch.empty(max(layout.max_len - 2, 0)), torch.empty(layout.total_targets)
    return (*leaves, *beta, layout.lengths, layout.num_targets, steps, targets)


def test_one_compiled_graph_for_all_sizes():
    harness.assert_trained_by_one_graph(
        Model(), [given_to(shapes) for shapes in BATCHES], lambda *given: given[:5]
    )


@pytest.mark.parametrize("delta", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_exported_graph_needs_no_op_of_ours_and_serves_all_sizes(delta):
    batches = [given_to(shapes, delta) for shapes in [*BATCHES, [(200, 1)], [(0, 0), (0, 0)]]]
    program = harness.exported(Model(), batches[0])
    nodes = [str(node.target) for node in program.graph.nodes]
    assert "while_loop" in nodes and not any(node.startswith("recsys") for node in nodes)
    harness.assert_serves(program.module(), Model(), batches)


def test_the_library_op_of_the_reference():
    for delta in (False, True):
        given = problem([(20, 2), (0, 0)], delta=delta).cast(torch.float32)
        layout, tensors = given.options["layout"], given.tensors
        facts = (layout.lengths, layout.offsets, layout.num_targets, 1, layout.max_len, 0.5)
        arguments = [tensors[name].requires_grad_() if name in tensors else None for name in Inputs._fields]
        torch.library.opcheck(reference.linear_attention_op, (*arguments, *facts))


Q, STATE = torch.zeros(5, HEADS, DIM), torch.zeros(1, HEADS, V_DIM, DIM)
RIGHT = {"q": Q, "k": Q, "v": torch.zeros(5, HEADS, V_DIM), "log_decay": Q}
STATE_SHAPE = r"initial_state must have shape \[samples, heads, D, V\] = \(1, 2, 3, 5\), got \(1, 2, 5, 3\)"
DECAY_SHAPE = r"log_decay must have the shape of q, \(5, 2, 3\), or \(5, 2\), got \(5, 1, 3\)"
DECAY_TYPE = "log_decay must be a floating point tensor, got a tensor of torch.int64"
WRONG = [
    ({"k": Q[:4]}, ValueError, "k has 4 rows, the layout total_len = 5"),
    ({"log_decay": Q.long()}, TypeError, DECAY_TYPE),
    ({"log_decay": Q[:, :1]}, ValueError, DECAY_SHAPE),
    ({"log_decay": Q.to("meta")}, ValueError, "log_decay is on meta, q on cpu"),
    ({"initial_state": 0.0}, TypeError, "initial_state must be a floating point tensor, got float"),
    ({"initial_state": STATE}, ValueError, STATE_SHAPE),
    ({"beta": Q}, ValueError, r"beta must have shape \(5, 2\), got \(5, 2, 3\)"),
    ({"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
]


def arguments(**changes):
    return {**RIGHT, "layout": SequenceLayout(torch.tensor([5])), **changes}


test_wrong_arguments_are_named = harness.refused(linear_attention, arguments, WRONG)

test_in_the_interpreter = harness.interpreter_test(__file__)


class Chunks(nn.Module):
    def forward(self, tokens, lengths, num_targets):
        return chunk_table(lengths, offsets_from_lengths(lengths), num_targets, tokens.shape[0], 16, 2)


def test_a_graph_searches_no_slice():
    """Inductor cannot compile that for a GPU."""
    rows = {0: Dim("rows", min=0)}
    example = (torch.empty(50), torch.tensor([40, 10]), torch.tensor([3, 4]))
    with fx_config.patch(backed_size_oblivious=True):
        captured = torch.export.export(
            Chunks(), example, dynamic_shapes=({0: Dim("tokens", min=0)}, rows, rows)
        )
    searches = [node for node in captured.graph.nodes if "searchsorted" in str(node.target)]
    assert [str(node.args[0].target) for node in searches] == ["aten.cumsum.default"] * 2
