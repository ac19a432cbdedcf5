"""`SequenceLayout`, by its operations and by its kernels, against lists built token by token."""

import pickle
from typing import NamedTuple

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from recsys.ops import SequenceLayout, offsets_from_lengths
from recsys.ops.jagged.layout import CONTEXTUAL, TARGET, UIH
from tests.ops.harness import interpreter_test, refused, runners
from tests.tools.interpreter import INTERPRETED

# Several programs of a kernel have the tokens of long samples, on a GPU too.
histories, targets = (st.one_of(st.integers(0, most), st.just(most * 16)) for most in (6, 4))
batches = st.tuples(st.integers(0, 3), st.lists(st.tuples(histories, targets), max_size=6))

everywhere = pytest.mark.parametrize("runner", runners("reference", "triton"))
drawn = hypothesis.settings(
    max_examples=4 if INTERPRETED else 40,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)


SMALL = {
    "jagged.layout_kernels": {"LANES": 16},
    "runtime.triton_support": {"has_kernels": lambda _: lambda device: True},
}
"""Layouts take the kernels in the interpreter, with several programs."""


class Token(NamedTuple):
    sample: int
    position: int
    kind: int


def tokens_of(contextual: int, shapes: list[tuple[int, int]]) -> list[Token]:
    tokens = []
    for sample, (uih, targets) in enumerate(shapes):
        kinds = [CONTEXTUAL] * contextual + [UIH] * uih + [TARGET] * targets
        tokens += [Token(sample, position, kind) for position, kind in enumerate(kinds)]
    return tokens


def layout_of(contextual: int, shapes: list[tuple[int, int]], dtype=torch.int64) -> SequenceLayout:
    columns = [(contextual + uih + targets, targets) for uih, targets in shapes]
    lengths, num_targets = (torch.tensor([row[n] for row in columns], dtype=dtype) for n in (0, 1))
    return SequenceLayout(lengths, num_targets, contextual)


def placed(batch, runner, trusted=False) -> SequenceLayout:
    """The layout on the runner's device; `trusted` ones have no copy of their lengths on the host."""
    layout = layout_of(*batch).to(runner.device)
    return without_host_copy(layout) if trusted else layout


def without_host_copy(layout: SequenceLayout) -> SequenceLayout:
    numbers = (layout.lengths, layout.offsets, layout.num_targets, layout.num_contextual)
    return SequenceLayout.trusted(*numbers, layout.total_len, layout.max_len + 2, layout.total_targets)


def assert_layout(layout: SequenceLayout, contextual: int, shapes: list[tuple[int, int]], exact_max=True):
    tokens = tokens_of(contextual, shapes)
    lengths = [contextual + uih + targets for uih, targets in shapes]
    assert layout.num_contextual == contextual
    assert layout.lengths.tolist() == lengths and layout.lengths.dtype == torch.int64
    assert layout.offsets.tolist() == [sum(lengths[:b]) for b in range(len(lengths) + 1)]
    assert layout.offsets.dtype == torch.int64
    assert layout.num_targets.tolist() == [targets for _, targets in shapes]
    assert layout.num_uih.tolist() == [uih for uih, _ in shapes]
    assert layout.total_len == len(tokens)
    assert layout.total_targets == sum(targets for _, targets in shapes)
    longest = max(lengths, default=0)
    assert layout.max_len == longest if exact_max else layout.max_len >= longest
    assert layout.sample_ids().tolist() == [token.sample for token in tokens]
    assert layout.positions().tolist() == [token.position for token in tokens]
    assert layout.kinds().tolist() == [token.kind for token in tokens] and layout.kinds().dtype == torch.int8


def assert_taken(moved, batch, part, trusted, is_taken) -> None:
    """A derived layout is that of `part`, and its index has the rows of the tokens that are taken."""
    layout, index = moved
    assert_layout(layout, *part, not trusted)
    assert index.tolist() == [row for row, token in enumerate(tokens_of(*batch)) if is_taken(token)]


@everywhere
@drawn
@hypothesis.given(batch=batches, dtype=st.sampled_from([torch.int32, torch.int64]))
def test_every_fact_follows_from_the_lengths(batch, dtype, runner):
    layout = layout_of(*batch, dtype=dtype).to(runner.device)
    assert_layout(layout, *batch)
    again = SequenceLayout.from_offsets(
        layout.offsets.to(dtype), layout.num_targets, batch[0], total_len=layout.total_len
    )
    assert_layout(again, *batch)


@hypothesis.given(batches)
def test_counts_of_a_reader_make_the_same_layout(batch):
    contextual, shapes = batch
    events, targets = (np.array([shape[side] for shape in shapes], np.int64) for side in (0, 1))
    layout = SequenceLayout.counted(contextual + events + targets, targets, contextual)
    assert_layout(layout, contextual, shapes)
    assert layout.to("meta").host_lengths.tolist() == layout.lengths.tolist()


@hypothesis.given(batches)
def test_the_padded_index_points_at_each_token_once(batch):
    layout = layout_of(*batch)
    padded = layout.padded_index()
    rows = {(token.sample, token.position): row for row, token in enumerate(tokens_of(*batch))}
    expected = [[rows.get((b, i), -1) for i in range(layout.max_len)] for b in range(layout.batch_size)]
    assert padded.index.tolist() == expected
    assert padded.valid.tolist() == [[row >= 0 for row in sample] for sample in expected]


both_ways = pytest.mark.parametrize("trusted", [False, True])


@everywhere
@both_ways
@drawn
@hypothesis.given(batch=batches, tail_len=st.sampled_from([*range(8), 70]))
def test_truncation_keeps_the_newest_events(trusted, batch, tail_len, runner):
    contextual, shapes = batch
    layout = placed(batch, runner, trusted)
    kept = layout.truncate(tail_len)
    left = [(min(uih, tail_len), targets) for uih, targets in shapes]

    def is_kept(token):
        return token.kind != UIH or shapes[token.sample][0] - (token.position - contextual) <= tail_len

    assert_taken(kept, batch, (contextual, left), trusted, is_kept)
    if trusted:  # what is left out shall not be padded for, even where the given size was a bound
        assert kept.layout.max_len == max([2, *(contextual + uih + targets for uih, targets in left)])
    again, index = kept.layout.truncate(2)  # a layout that was derived knows its totals too
    assert_layout(again, contextual, [(min(uih, 2), targets) for uih, targets in left], not trusted)
    assert len(index) == again.total_len
    assert layout.truncate(tail_len).layout is kept.layout  # computed once for all who ask


@everywhere
@both_ways
@drawn
@hypothesis.given(batch=batches, start=st.sampled_from([*range(5), 40]), size=st.integers(0, 3))
def test_each_kind_and_slices_of_targets_can_be_cut_out_and_put_together_again(
    trusted, batch, start, size, runner
):
    contextual, shapes = batch
    layout, history = placed(batch, runner, trusted), [(uih, 0) for uih, _ in shapes]
    sliced = [(0, min(max(targets - start, 0), size)) for _, targets in shapes]

    def is_in_slice(token):
        number = token.position - contextual - shapes[token.sample][0]
        return token.kind == TARGET and start <= number < start + size

    for moved, part, is_taken in (
        (layout.history_only(), (0, history), lambda token: token.kind == UIH),
        (layout.targets_only(), (0, [(0, n) for _, n in shapes]), lambda token: token.kind == TARGET),
        (layout.without_targets(), (contextual, history), lambda token: token.kind != TARGET),
        (layout.targets_between(start, start + size), (0, sliced), is_in_slice),
    ):
        assert_taken(moved, batch, part, trusted, is_taken)
    tokens = tokens_of(*batch)
    blocks = [
        row for kind in (CONTEXTUAL, UIH, TARGET) for row, token in enumerate(tokens) if token.kind == kind
    ]
    assert layout.disassemble_index().tolist() == blocks
    assert [blocks[row] for row in layout.assemble_index().tolist()] == list(range(layout.total_len))


@everywhere
@both_ways
@drawn
@hypothesis.given(batch=batches, numbers=st.lists(st.integers(0, 99), max_size=7))
def test_samples_are_selected_in_any_order(trusted, batch, numbers, runner):
    contextual, shapes = batch
    samples = [number % len(shapes) for number in numbers] if shapes else []
    selected, index = placed(batch, runner, trusted).select(samples)
    assert_layout(selected, contextual, [shapes[sample] for sample in samples], not trusted)
    tokens = list(enumerate(tokens_of(*batch)))
    assert index.tolist() == [row for sample in samples for row, token in tokens if token.sample == sample]


def test_only_samples_that_are_there_can_be_selected():
    for sample in (2, -1):
        with pytest.raises(IndexError, match=r"samples must be in \[0, 2\), got \[0, "):
            layout_of(0, [(3, 1), (1, 1)]).select([0, sample])


def test_parts_without_host_copies_are_truncated_to_one_bound():
    """Two bounds would meet as their larger one, which a compiler of an exported graph cannot size."""
    parts = [[(6, 2), (0, 1)], [(1, 1), (3, 0)]]
    joined = SequenceLayout.join([without_host_copy(layout_of(2, shapes)) for shapes in parts])
    kept, index = joined.truncate(4)
    assert [part.max_len for part in kept.parts] == [8, 8]
    assert (kept.max_len, kept.total_len, len(index)) == (8, 20, 20)
    left = [[(4, 2), (0, 1)], [(1, 1), (3, 0)]]
    assert_layout(kept, 2, sum(left, []))
    for part, shapes in zip(kept.parts, left, strict=True):
        assert_layout(part, 2, shapes, exact_max=False)


def test_what_is_derived_from_a_joined_layout_is_joined():
    shapes = ([(5, 2), (0, 1)], [(1, 2), (4, 1)])
    joined = SequenceLayout.join([layout_of(2, part) for part in shapes])
    flat = layout_of(2, shapes[0] + shapes[1])
    for derive in (
        SequenceLayout.history_only,
        SequenceLayout.without_targets,
        SequenceLayout.targets_only,
        lambda layout: layout.truncate(3),
        lambda layout: layout.targets_between(1, 2),
    ):
        (derived, index), (expected, rows) = derive(joined), derive(flat)
        assert index.tolist() == rows.tolist() and derived.lengths.tolist() == expected.lengths.tolist()
        assert [part.batch_size for part in derived.parts] == [2, 2] and derived.max_len == expected.max_len
    derived, index = joined.select([1])
    expected, rows = flat.select([1, 3])
    assert index.tolist() == rows.tolist() and derived.lengths.tolist() == expected.lengths.tolist()
    assert [part.lengths.tolist() for part in derived.parts] == [[3], [7]]


def test_moving_keeps_totals_on_the_host():
    """On a device that holds no numbers, nothing can be read: every total must come from the host copy."""
    layout = layout_of(1, [(5, 2), (0, 1), (3, 0)]).to("meta")
    assert layout.device.type == "meta" and layout.total_len == 14
    kept, index = layout.truncate(2)
    assert (kept.total_len, kept.max_len, kept.total_targets) == (10, 5, 3)
    assert index.shape == (10,) and index.device.type == "meta"
    assert layout.history_only().layout.max_len == 5 and layout.targets_only().layout.max_len == 2
    assert layout.assemble_index().shape == (14,)
    assert layout.select([2, 0, 2])[1].shape == (16,) and layout.without_targets().layout.max_len == 6
    assert layout.targets_between(1, 9).layout.total_targets == 1
    assert layout.to("meta", non_blocking=True).host_lengths.tolist() == [8, 2, 4]


def test_a_moved_layout_comes_back_from_its_host_copy():
    layout = layout_of(2, [(5, 1), (0, 0), (2, 0)])
    assert layout.on_host() is layout
    back = layout.to("meta").on_host()
    assert back.num_uih.tolist() == [5, 0, 2] and back.num_targets.tolist() == [1, 0, 0]
    with pytest.raises(ValueError, match="on meta only; take a layout built on the host"):
        without_host_copy(layout.to("meta")).on_host()


def test_workers_can_send_a_layout():
    batch = (2, [(3, 1), (0, 0)])
    assert_layout(pickle.loads(pickle.dumps(layout_of(*batch))), *batch)  # noqa: S301 - our own bytes


def test_totals_past_32_bits_do_not_wrap():
    layout = SequenceLayout(torch.tensor([2**31 - 1, 2**31 - 1, 5], dtype=torch.int32))
    assert layout.total_len == 2**32 + 3 and layout.offsets.tolist()[-1] == 2**32 + 3
    assert offsets_from_lengths(torch.tensor([2**31 - 1, 1], dtype=torch.int32)).tolist()[-1] == 2**31


def ints(*values):
    return torch.tensor(values, dtype=torch.int64)


SMALL_SUM = r"sample 1 has lengths\[1\] = 3 tokens, fewer than num_contextual = 2 plus num_targets\[1\] = 2"
FLOATS = "lengths must be an int32 or int64 tensor, got a tensor of torch.float32"
WRONG = [
    ({"lengths": [3, 2]}, TypeError, "lengths must be an int32 or int64 tensor, got list"),
    ({"lengths": torch.ones(2)}, TypeError, FLOATS),
    ({"lengths": ints(3, 2)[None]}, ValueError, r"lengths must have one dimension, got shape \(1, 2\)"),
    ({"lengths": ints(3, -2, -4)}, ValueError, r"lengths must be >= 0, but lengths\[1\] = -2"),
    ({"num_targets": ints(1, -1)}, ValueError, r"num_targets must be >= 0, but num_targets\[1\] = -1"),
    ({"num_targets": ints(1)}, ValueError, "num_targets must have one entry a sample: 1 for 2 lengths"),
    ({"num_targets": torch.ones(2)}, TypeError, "num_targets must be an int32 or int64 tensor"),
    ({"num_contextual": -1}, ValueError, "num_contextual must be >= 0, got -1"),
    ({"num_contextual": 1.0}, TypeError, "num_contextual must be an int, got float"),
    ({"lengths": ints(9, 3), "num_targets": ints(1, 2), "num_contextual": 2}, ValueError, SMALL_SUM),
    ({"lengths": ints(2**62, 2**62)}, ValueError, r"lengths must add up to less than 2\*\*63"),
]
WRONG_OFFSETS = [
    ({"offsets": ints()}, ValueError, r"offsets must have B \+ 1 entries and start at 0, got \[\]"),
    ({"offsets": ints(1, 3)}, ValueError, r"offsets must have B \+ 1 entries and start at 0, got \[1, 3\]"),
    ({"offsets": ints(0, 3, 2)}, ValueError, "offsets must not decrease, but sample 1 runs from 3 to 2"),
    ({"offsets": ints(0, 3, 5), "total_len": 6}, ValueError, "offsets end at 5, but total_len = 6"),
]

test_contradictions_name_the_sample = refused(
    SequenceLayout, lambda **changes: {"lengths": ints(3, 2)} | changes, WRONG
)
test_offsets_that_cannot_be_are_refused = refused(SequenceLayout.from_offsets, dict, WRONG_OFFSETS)


def test_a_negative_tail_is_refused():
    with pytest.raises(ValueError, match="tail_len must be >= 0, got -1"):
        layout_of(0, [(3, 1)]).truncate(-1)


def test_it_prints_its_facts():
    shown = repr(layout_of(1, [(3, 2), (0, 0)]))
    assert shown == (
        "SequenceLayout(batch_size=2, total_len=7, max_len=6, num_contextual=1, total_targets=2, device=cpu)"
    )


test_the_kernels_in_the_interpreter = interpreter_test(__file__)
