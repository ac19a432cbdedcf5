"""Compute the attention mask inside kernels, in every form that a kernel needs, from one set of edge rules.

`recsys.ops.jagged.mask` defines the mask; its tests and those of this file compare both with the same table.
A kernel uses one of these forms:

    visible             whether a row sees a key; few bounds per row
    visible_from_keys   the same with few bounds per key, for a thread that holds few keys and many rows
    keys_of_row         the keys that a row sees, as three intervals
    rows_of_key         the rows that see a key, as three intervals
    tile_intervals      what at least one token of a tile sees (or is seen by), and what all of its tokens
                        have in common: blocks inside the common part need no mask

All forms are inlined into Triton kernels and, because Gluon can call Triton functions, into the Hopper
kernels. Positions count from the start of the sample. Related values travel as tuples:

    rule    num_contextual, window, prefix, group_size
    RULE    WINDOWED, TARGET_WINDOW, GROUPED, CONTEXTUAL_READS: which parts of the mask are present

`history_end` is the position of the sample's first target.
"""

import triton
import triton.language as tl

from recsys.ops.jagged.mask import AttentionMask

BEHIND_ALL = tl.constexpr(0x7FFFFFFF)
"""A position behind all tokens of a sample, int32."""

FAR = tl.constexpr(2**62)
"""A position behind all tokens of a sample, int64."""


def rule_of(mask: AttentionMask, num_contextual: int) -> tuple[int, int, int, int]:
    """Return the numbers of `rule`; 0 stands for no window."""
    return num_contextual, mask.window or 0, mask.prefix, mask.target_group_size


def rules(mask: AttentionMask) -> dict[str, bool]:
    """Return the parts of `RULE` by the names of the kernels' parameters."""
    return {
        "WINDOWED": mask.window is not None,
        "TARGET_WINDOW": mask.target_window,
        "GROUPED": mask.target_group_size > 1,
        "CONTEXTUAL_READS": mask.contextual_reads_history,
    }


# Edge rules.


@triton.jit
def history_limit(i, history_end):
    """Return the first history key that row `i` does not see yet: targets see all history, history rows see
    up to themselves."""
    return tl.where(i >= history_end, history_end, i + 1)


@triton.jit
def pinned_end(rule):
    """Return the end of the pinned keys, contextual tokens and prefix, which never fall out of a window."""
    return rule[0] + rule[2]


@triton.jit
def window_start(limit, rule):
    """Return the first key inside the window of a row whose `history_limit` is `limit`."""
    return limit - rule[1]


@triton.jit
def window_end(j, history_end, rule):
    """Return the first history row whose window no longer holds key `j`, at most `history_end`."""
    return tl.minimum(j, history_end - rule[1]) + rule[1]


@triton.jit
def contextual_limit(history_end, rule, RULE: tl.constexpr):
    """Return the end of the keys that contextual rows see."""
    if RULE[3]:
        return history_end
    else:
        return rule[0]


@triton.jit
def group_start(position, target, rule):
    """Return the first token of a target's group; `target` is the target's number, counted from 0."""
    return position - target % rule[3]


# Forms.


@triton.jit
def visible(i, j, history_end, rule, RULE: tl.constexpr):
    """Return True where row `i` sees key `j`; `i` and `j` must broadcast against each other."""
    is_target = i >= history_end
    limit = history_limit(i, history_end)
    first_end = limit
    if RULE[0]:
        first_end = tl.minimum(pinned_end(rule), limit)
        if not RULE[1]:
            first_end = tl.where(is_target, history_end, first_end)
    first_end = tl.where(i < rule[0], contextual_limit(history_end, rule, RULE), first_end)
    seen = j < first_end
    if RULE[0]:  # the window of a contextual row lies within the contextual tokens, which it sees anyway
        seen = seen | ((j >= window_start(limit, rule)) & (j < limit))
    if RULE[2]:
        start = tl.where(is_target, group_start(i, i - history_end, rule), i + 1)
        return seen | ((j >= start) & (j <= i))
    else:
        return seen | (j == i)


@triton.jit
def visible_from_keys(i, j, history_end, rule, RULE: tl.constexpr):
    """Compute `visible` with bounds for each key. Rows past the end of the sample may count as visible."""
    num_contextual = rule[0]
    is_target = j >= history_end
    own_end = j + 1
    if RULE[2]:
        own_end = group_start(j, tl.maximum(j - history_end, 0), rule) + rule[3]
    end = tl.where(is_target, own_end, BEHIND_ALL)
    if RULE[0]:
        pinned = j < pinned_end(rule)
        end = tl.where(is_target, own_end, tl.where(pinned, BEHIND_ALL, window_end(j, history_end, rule)))
    contextual_end = tl.where(j < contextual_limit(history_end, rule, RULE), num_contextual, 0)
    seen = ((i >= tl.maximum(j, num_contextual)) & (i < end)) | (i < contextual_end)
    if RULE[0]:
        target_start = tl.where(is_target, BEHIND_ALL, history_end)
        if RULE[1]:
            in_window = j >= window_start(history_end, rule)
            target_start = tl.where(pinned | in_window, target_start, BEHIND_ALL)
        seen = seen | (i >= target_start)
    return seen


@triton.jit
def keys_of_row(i, history_end, rule, RULE: tl.constexpr):
    """Return the ends of the intervals of keys that row `i` sees: [0, a), [b, c) and [d, e), ascending."""
    is_target, is_contextual = i >= history_end, i < rule[0]
    limit = history_limit(i, history_end)
    first_end, middle_start, middle_end = limit, limit, limit
    if RULE[0]:
        first_end = tl.minimum(pinned_end(rule), limit)
        middle_start = tl.maximum(first_end, window_start(limit, rule))
        if not RULE[1]:
            first_end = tl.where(is_target, limit, first_end)
            middle_start = tl.where(is_target, limit, middle_start)
    contextual_end = contextual_limit(history_end, rule, RULE)
    first_end = tl.where(is_contextual, contextual_end, first_end)
    middle_start = tl.where(is_contextual, contextual_end, middle_start)
    middle_end = tl.where(is_contextual, contextual_end, middle_end)
    group = group_start(i, tl.maximum(i - history_end, 0), rule)
    last_start = tl.where(is_target, group, middle_end)
    last_end = tl.where(is_target, i + 1, middle_end)
    return first_end, middle_start, middle_end, last_start, last_end


@triton.jit
def rows_of_key(j, history_end, length, rule, RULE: tl.constexpr):
    """Return the ends of the intervals of rows that see key `j`: contextual rows [0, a), history rows [b, c)
    and targets [d, e)."""
    num_contextual = rule[0]
    is_target = j >= history_end
    pinned = j < pinned_end(rule)
    contextual_end = tl.where(j < contextual_limit(history_end, rule, RULE), num_contextual, 0).to(tl.int64)
    history_start = tl.where(is_target, history_end, tl.maximum(j, num_contextual))
    history_stop = history_end
    if RULE[0]:
        history_stop = tl.where(pinned | is_target, history_end, window_end(j, history_end, rule))
    group_end = group_start(j, tl.maximum(j - history_end, 0), rule) + rule[3]
    target_start = tl.where(is_target, j, history_end)
    target_stop = tl.where(is_target, tl.minimum(group_end, length), length)
    if RULE[0] and RULE[1]:
        hidden = (j < window_start(history_end, rule)) & ~is_target & ~pinned
        target_stop = tl.where(hidden, target_start, target_stop)
    return contextual_end, history_start, history_stop, target_start, target_stop


@triton.jit
def tile_intervals(first, last, before, history_end, length, rule, RULE: tl.constexpr, KEYS: tl.constexpr):
    """Return, over the tokens `first` to `last`, the hull of each of the three intervals of `keys_of_row`
    (with KEYS, of `rows_of_key`), and the part of each interval that all of these tokens have in common.

    Tokens count from behind the first `before` tokens of the sample, intervals from the sample's start. A
    hull is [0, 0) where all of its intervals are empty.
    """
    # The ends of an interval are constant or increasing over tokens of one kind, so the first and the last
    # token of each kind have the extremes. The first key of the last target's window is an edge, too.
    zero = first * 0
    hull_a, hull_b, hull_c = (zero + FAR, zero), (zero + FAR, zero), (zero + FAR, zero)
    end_a, end_b, end_c = zero + FAR, zero + FAR, zero + FAR
    start_b, start_c = zero - FAR, zero - FAR
    for edge in tl.static_range(10 if KEYS else 8):
        if edge == 0:
            position = first
        elif edge == 1:
            position = last
        elif edge < 4:
            position = zero + rule[0] + (edge - 3) - before
        elif edge < 6:
            position = zero + pinned_end(rule) + (edge - 5) - before
        elif edge < 8:
            position = history_end + (edge - 7) - before
        else:
            position = window_start(history_end, rule) + (edge - 9) - before
        position = tl.maximum(tl.minimum(position, last), first) + before
        if KEYS:
            a, b, c, d, e = rows_of_key(position, history_end, length, rule, RULE)
        else:
            a, b, c, d, e = keys_of_row(position, history_end, rule, RULE)
        hull_a, hull_b, hull_c = _joined(hull_a, zero, a), _joined(hull_b, b, c), _joined(hull_c, d, e)
        end_a, end_b, end_c = tl.minimum(end_a, a), tl.minimum(end_b, c), tl.minimum(end_c, e)
        start_b, start_c = tl.maximum(start_b, b), tl.maximum(start_c, d)
    hulls = (_or_empty(hull_a), _or_empty(hull_b), _or_empty(hull_c))
    return hulls, ((zero, end_a), (start_b, end_b), (start_c, end_c))


@triton.jit
def _joined(hull, start, end):
    """Return the hull of `hull` and [start, end), which is ignored where it is empty."""
    used = end > start
    low = tl.where(used, tl.minimum(hull[0], start), hull[0])
    return low, tl.where(used, tl.maximum(hull[1], end), hull[1])


@triton.jit
def _or_empty(hull):
    """Return the hull, or [0, 0) where no interval was joined to it."""
    return tl.where(hull[1] > 0, hull[0], 0), hull[1]
