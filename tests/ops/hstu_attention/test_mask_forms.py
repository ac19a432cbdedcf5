"""Every form of the mask, on the host and in kernels, against the table of who sees whom.

The kernels' forms are run as plain Python on tensors of positions; what a compiler makes of them is for the
tests of the kernels.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch

from recsys.ops.jagged import mask as definition
from tests.ops.cases import MASKS, samples
from tests.ops.oracle import table

pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")

from recsys.ops.hstu_attention import mask_forms
from tests.tools.gluon_emulator import as_python

SHAPES = [(9, 5), (0, 3), (7, 0), (2, 6)]


def whole(x):
    return x if isinstance(x, torch.Tensor) else torch.tensor(x)


LANGUAGE = SimpleNamespace(
    where=torch.where,
    minimum=lambda a, b: torch.minimum(whole(a), whole(b)),
    maximum=lambda a, b: torch.maximum(whole(a), whole(b)),
    static_range=range,
    int64=torch.int64,
)


def in_kernel(name):
    """A form of the kernels as a function of tensors."""
    return as_python(getattr(mask_forms, name), {"tl": LANGUAGE})


def rules(mask, sample) -> tuple:
    """`rule` and `RULE` of the kernels."""
    rule = (sample.contextual, mask.window or 0, mask.prefix, mask.target_group_size)
    parts = (mask.window is not None, mask.target_window, mask.target_group_size > 1)
    return rule, (*parts, mask.contextual_reads_history)


def inside(ends, position) -> torch.Tensor:
    """bool [tokens, positions]: the positions in the intervals [0, a), [b, c) and [d, e) of each token."""
    a, b, c, d, e = (end.expand(len(position))[:, None] for end in ends)
    at = position[None, :]
    parts = [at < a, (at >= b) & (at < c), (at >= d) & (at < e)]
    assert int(sum(part.int() for part in parts).max()) <= 1, "the intervals overlap"
    return parts[0] | parts[1] | parts[2]


def flat(intervals) -> list[torch.Tensor]:
    """The ends of three intervals [..., 3], the first of which begins at 0."""
    assert not intervals.start[..., 0].any() and bool((intervals.end >= intervals.start).all())
    start, end = intervals.start, intervals.end
    return [end[..., 0], start[..., 1], end[..., 1], start[..., 2], end[..., 2]]


def visible_pairs(mask, sample, token, end):
    return definition.visible_pairs(mask, end[None], sample.contextual, sample.length)[0]


def row_intervals(mask, sample, token, end):
    return inside(flat(definition.row_intervals(mask, token, end, sample.contextual)), token)


def column_intervals(mask, sample, token, end):
    length = torch.tensor(sample.length)
    return inside(flat(definition.column_intervals(mask, token, end, length, sample.contextual)), token).T


def visible(mask, sample, token, end):
    return in_kernel("visible")(token[:, None], token[None, :], end, *rules(mask, sample))


def visible_from_keys(mask, sample, token, end):
    return in_kernel("visible_from_keys")(token[:, None], token[None, :], end, *rules(mask, sample))


def keys_of_row(mask, sample, token, end):
    return inside(in_kernel("keys_of_row")(token, end, *rules(mask, sample)), token)


def rows_of_key(mask, sample, token, end):
    length = torch.tensor(sample.length)
    return inside(in_kernel("rows_of_key")(token, end, length, *rules(mask, sample)), token).T


FORMS = (visible_pairs, row_intervals, column_intervals)
FORMS += (visible, visible_from_keys, keys_of_row, rows_of_key)


@pytest.mark.parametrize("contextual", [0, 1, 3])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_a_form_is_the_table(form, contextual):
    for mask, sample in itertools.product(MASKS, samples(contextual, SHAPES)):
        token, end = torch.arange(sample.length), torch.tensor(contextual + sample.uih)
        assert torch.equal(form(mask, sample, token, end), torch.tensor(table(sample, mask))), (mask, sample)


def ends_by_tile(intervals, tiles: int) -> list[tuple[tuple[int, int], ...]]:
    """The start and the end of each interval, by tile."""
    pairs = [zip(*(end.expand(tiles).tolist() for end in ends), strict=True) for ends in intervals]
    return list(zip(*pairs, strict=True))


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("contextual", [0, 3])
def test_intervals_of_a_tile_cover_what_it_sees_and_have_in_common_what_all_of_it_sees(contextual, keys):
    intervals_of = in_kernel("tile_intervals")
    for mask, sample in itertools.product(MASKS, samples(contextual, SHAPES)):
        tokens, rows = range(sample.length), table(sample, mask)
        rows = [list(column) for column in zip(*rows, strict=True)] if keys else rows
        tiles = [(first, last) for first in tokens for last in range(first, min(first + 5, sample.length))]
        end, length = torch.tensor(contextual + sample.uih), torch.tensor(sample.length)
        for before in (0,) if keys else (0, 2):
            behind = [(first, last) for first, last in tiles if first >= before]
            first, last = (torch.tensor(edge) - before for edge in zip(*behind, strict=True))
            hulls, common = intervals_of(first, last, before, end, length, *rules(mask, sample), keys)
            covers, shares = (ends_by_tile(intervals, len(behind)) for intervals in (hulls, common))
            for (low, high), covering, shared in zip(behind, covers, shares, strict=True):
                columns, where = list(zip(*rows[low : high + 1], strict=True)), (mask, sample, low, high)
                seen = {j for j in tokens if any(columns[j])}
                assert seen <= {j for start, stop in covering for j in range(start, stop)}, where
                assert all(
                    stop == 0 or (start < stop and {start, stop - 1} <= seen) for start, stop in covering
                )
                for start, stop in shared:
                    assert stop <= start or all(map(all, columns[max(start, 0) : stop])), where
