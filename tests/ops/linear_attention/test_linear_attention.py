"""`linear_attention` against its recurrence, token by token in float64, with and without the delta rule."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim
from torch.fx.experimental import _config as fx_config

from recsys.ops import SequenceLayout, explain, last_backend, linear_attention, offsets_from_lengths
from recsys.ops.linear_attention import reference

HEADS, DIM, V_DIM = 2, 3, 5


def problem(shapes, contextual=0, dtype=torch.float64, seed=0, strength=1.0, delta=False):
    """A layout of (history, targets) samples, and leaves for it."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor(shapes, dtype=torch.int64).reshape(-1, 2)
    layout = SequenceLayout(counts.sum(1) + contextual, counts[:, 1].contiguous(), contextual)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rows, samples = layout.total_len, layout.batch_size
    leaves = {
        "q": normal(rows, HEADS, DIM),
        "k": normal(rows, HEADS, DIM),
        "v": normal(rows, HEADS, V_DIM),
        "log_decay": -strength * normal(rows, HEADS, DIM).abs(),
        "initial_state": normal(samples, HEADS, DIM, V_DIM),
    }
    if delta:
        leaves["k"] = torch.nn.functional.normalize(leaves["k"], dim=-1)
        leaves["beta"] = torch.rand(rows, HEADS, generator=generator, dtype=torch.float64)
    return layout, {name: leaf.to(dtype).requires_grad_() for name, leaf in leaves.items()}


def by_hand(layout, q, k, v, log_decay, initial_state, scale, beta=None):
    """The formulas, one token and head at a time."""
    out, final = [None] * layout.total_len, []
    for sample, (start, end) in enumerate(pairwise(layout.offsets.tolist())):
        first_target = end - int(layout.num_targets[sample])
        states = [initial_state[sample, head] for head in range(HEADS)]
        for row in range(start, end):
            rows = []
            for head in range(HEADS):
                decayed = log_decay[row, head].exp()[:, None] * states[head]
                key, value = k[row, head], v[row, head]
                if beta is None:
                    state = decayed + torch.outer(key, value)
                else:
                    replaced = torch.eye(DIM, dtype=key.dtype) - beta[row, head] * torch.outer(key, key)
                    state = replaced @ decayed + beta[row, head] * torch.outer(key, value)
                rows.append(scale * (state.T @ q[row, head]))
                if row < first_target:
                    states[head] = state
            out[row] = torch.stack(rows)
        final.append(torch.stack(states))
    return torch.stack(out) if out else v, torch.stack(final) if final else initial_state


def check(layout, leaves, scale=0.7):
    found = linear_attention(layout=layout, scale=scale, **leaves)
    assert last_backend("linear_attention") == "reference"
    wanted = by_hand(layout, scale=scale, **leaves)
    cotangents = [torch.randn_like(one) for one in wanted]
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want)
    gradients = (
        torch.autograd.grad(both, list(leaves.values()), cotangents, materialize_grads=True)
        for both in (tuple(found), wanted)
    )
    for name, got, want in zip(leaves, *gradients, strict=True):
        torch.testing.assert_close(got, want, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("contextual", [0, 1, 3])
@pytest.mark.parametrize(
    "shapes", [[(5, 2), (0, 3), (40, 0), (0, 0)], [(1, 0)], [(0, 4)], [(16, 1), (17, 0), (33, 2)]]
)
@pytest.mark.parametrize("delta", [False, True])
def test_outputs_states_and_all_gradients_are_those_of_the_recurrence(shapes, contextual, delta):
    check(*problem(shapes, contextual, delta=delta))


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), max_size=4), st.integers(0, 2))
def test_random_layouts(shapes, contextual):
    if shapes and contextual + sum(map(sum, shapes)):
        check(*problem(shapes, contextual, seed=len(shapes)))


@pytest.mark.parametrize("shapes", [[], [(0, 0), (0, 0)]])
def test_a_batch_without_tokens(shapes):
    layout, leaves = problem(shapes)
    out, final = linear_attention(layout=layout, **leaves)
    assert out.shape == (0, HEADS, V_DIM) and torch.equal(final, leaves["initial_state"])
    (out.sum() + final.sum()).backward()
    assert not leaves["q"].grad.any() and (leaves["initial_state"].grad == 1).all()


def test_a_decay_a_head_and_what_is_left_out():
    layout, leaves = problem([(20, 2), (3, 1)])
    narrow = leaves["log_decay"][:, :, :1].detach()
    rest = {name: leaves[name] for name in ("q", "k", "v")}
    zeros = torch.zeros(2, HEADS, DIM, V_DIM, dtype=torch.float64)
    want = by_hand(layout, **rest, log_decay=narrow.expand(-1, -1, DIM), initial_state=zeros, scale=DIM**-0.5)
    found = linear_attention(layout=layout, log_decay=narrow[..., 0], **rest)
    for got, one in zip(found, want, strict=True):
        torch.testing.assert_close(got, one)
    assert not linear_attention(layout=layout, log_decay=narrow[..., 0], scale=0.0, **rest).out.any()


def test_a_history_in_two_calls_is_one_history():
    layout, leaves = problem([(30, 0), (25, 0)])
    cut = [13, 0]
    mask = torch.cat([torch.arange(n) < c for n, c in zip((30, 25), cut, strict=True)])
    state, parts = leaves.pop("initial_state"), []
    whole = linear_attention(layout=layout, initial_state=state, **leaves)
    for chosen, lengths in ((mask, cut), (~mask, [17, 25])):
        part = SequenceLayout(torch.tensor(lengths))
        tensors = {name: leaf[chosen] for name, leaf in leaves.items()}
        out, state = linear_attention(layout=part, initial_state=state, **tensors)
        parts.append(out)
    torch.testing.assert_close(parts[0], whole.out[mask])
    torch.testing.assert_close(parts[1], whole.out[~mask])
    torch.testing.assert_close(state, whole.final_state)


def test_strong_decays_are_divided_by_none():
    layout, leaves = problem([(64, 1)], strength=300.0, dtype=torch.float32)
    out, final = linear_attention(layout=layout, **leaves)
    (out.sum() + final.sum()).backward()
    assert out.isfinite().all() and all(leaf.grad.isfinite().all() for leaf in leaves.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_types_are_summed_in_float32(dtype):
    layout, exact = problem([(100, 3), (7, 0)])
    narrow = {name: leaf.detach().to(dtype) for name, leaf in exact.items()}
    widened = {name: leaf.double() for name, leaf in narrow.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_attention(layout=layout, **narrow)
    wanted = linear_attention(layout=layout, **widened)
    assert found.out.dtype == dtype and found.final_state.dtype == torch.float32
    torch.testing.assert_close(found.final_state.double(), wanted.final_state, rtol=1e-5, atol=1e-5)
    allowed = 2**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.out.double(), wanted.out, rtol=allowed, atol=allowed)


def test_a_sample_does_not_know_its_batch_mates_nor_a_target_the_others():
    layout, leaves = problem([(20, 3), (45, 1)], contextual=1)
    out, final = linear_attention(layout=layout, **leaves)
    kept = [*range(21), 23, 21]  # the first sample: its third target, then its first
    alone = {name: leaf[kept] for name, leaf in leaves.items() if name != "initial_state"}
    small = SequenceLayout(torch.tensor([23]), torch.tensor([2]), 1)
    got = linear_attention(layout=small, initial_state=leaves["initial_state"][:1], **alone)
    torch.testing.assert_close(got.out, out[kept])
    torch.testing.assert_close(got.final_state, final[:1])


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
    layout, leaves = problem(shapes, contextual=1, dtype=torch.float32, delta=delta)
    beta = [] if delta else [None]
    steps, targets = torch.empty(max(layout.max_len - 2, 0)), torch.empty(layout.total_targets)
    facts = (layout.lengths, layout.num_targets, steps, targets)
    return layout, leaves, (*leaves.values(), *beta, *facts)


def test_one_compiled_graph_for_all_sizes():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(Model(), backend=counter, fullgraph=True, dynamic=True)
    for shapes in BATCHES:
        layout, leaves, arguments = given_to(shapes)
        wanted = linear_attention(layout=layout, **leaves)
        cotangents = [torch.randn_like(one) for one in wanted]
        both = [
            torch.autograd.grad(made, list(leaves.values()), cotangents)
            for made in (compiled(*arguments), tuple(wanted))
        ]
        for got, want in zip(*both, strict=True):
            torch.testing.assert_close(got, want)
    assert counter.frame_count == 1


@pytest.mark.parametrize("delta", [False, True])
def test_an_exported_graph_needs_no_op_of_ours_and_serves_all_sizes(delta):
    model, (*_, arguments) = Model(), given_to(BATCHES[0], delta)
    with torch.no_grad(), fx_config.patch(backed_size_oblivious=True):
        dims = tuple(None if one is None else {0: Dim.DYNAMIC} for one in arguments)
        program = torch.export.export(model, arguments, dynamic_shapes=dims, strict=False)
    nodes = [str(node.target) for node in program.graph.nodes]
    assert "while_loop" in nodes and not any(node.startswith("recsys") for node in nodes)
    with torch.no_grad():
        for shapes in [*BATCHES, [(200, 1)], [(0, 0), (0, 0)]]:
            *_, arguments = given_to(shapes, delta)
            for got, want in zip(program.module()(*arguments), model(*arguments), strict=True):
                torch.testing.assert_close(got, want)


def test_the_library_op():
    layout, leaves = problem([(20, 2), (0, 0)], contextual=1, dtype=torch.float32, delta=True)
    facts = (layout.lengths, layout.offsets, layout.num_targets, 1, layout.max_len, 0.5)
    order = ("q", "k", "v", "log_decay", "beta", "initial_state")
    for beta in (leaves["beta"], None):
        arguments = [(leaves | {"beta": beta})[name] for name in order]
        torch.library.opcheck(reference.linear_attention_op, (*arguments, *facts))


Q = torch.zeros(5, HEADS, DIM)
RIGHT = {"q": Q, "k": Q, "v": torch.zeros(5, HEADS, V_DIM), "log_decay": Q}
WRONG = [
    ({"k": Q[:4]}, ValueError, "k has 4 rows, the layout total_len = 5"),
    (
        {"log_decay": Q.long()},
        TypeError,
        "log_decay must be a floating point tensor, got a tensor of torch.int64",
    ),
    (
        {"log_decay": Q[:, :1]},
        ValueError,
        r"log_decay must have the shape of q, \(5, 2, 3\), or \(5, 2\), got \(5, 1, 3\)",
    ),
    ({"log_decay": Q.to("meta")}, ValueError, "log_decay is on meta, q on cpu"),
    ({"initial_state": 0.0}, TypeError, "initial_state must be a floating point tensor, got float"),
    (
        {"initial_state": torch.zeros(1, HEADS, V_DIM, DIM)},
        ValueError,
        r"initial_state must have shape \[samples, heads, D, V\] = \(1, 2, 3, 5\), got \(1, 2, 5, 3\)",
    ),
    ({"beta": Q}, ValueError, r"beta must have shape \(5, 2\), got \(5, 2, 3\)"),
    ({"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
    (
        {"backend": "sm90"},
        ValueError,
        "linear_attention has no backend 'sm90'; it has auto, triton, reference",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_wrong_arguments_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        linear_attention(**{**RIGHT, "layout": SequenceLayout(torch.tensor([5])), **changes})


def test_explain_answers_for_it():
    layout = SequenceLayout(torch.tensor([5]))
    assert dict(explain("linear_attention", **RIGHT, layout=layout).rows)["reference"].ok
