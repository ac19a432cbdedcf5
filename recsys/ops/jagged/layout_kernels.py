"""What a layout says of each token, by kernels: a program has some tokens and looks up their samples."""

import triton
import triton.language as tl


@triton.jit
def _sample_of(offsets, token, inside, batch_size, steps):
    """The sample of each token, B for one that is none; 2^steps > B."""
    low, high = token * 0, token * 0 + batch_size
    for _ in range(steps):
        middle = (low + high) // 2
        passed = tl.load(offsets + 1 + middle, mask=inside & (low < high), other=2**62) <= token
        low, high = tl.where(passed, middle + 1, low), tl.where(passed, high, middle)
    return low


@triton.jit(do_not_specialize=["total_len", "batch_size", "steps", "contextual", "history_rows"])
def tokens_kernel(
    offsets, lengths, num_targets, targets_until, sample_ids, positions, rows, tokens,
    total_len, batch_size, steps, contextual, history_rows,
    LANES: tl.constexpr,
):  # fmt: skip
    """Of each token its sample, its position, its row in [contextual | history | targets] of all samples, and
    of each row its token. `targets_until` [B]: targets up to each sample's last; `history_rows`: of all."""
    token = (tl.program_id(0) * LANES + tl.arange(0, LANES)).to(tl.int64)
    inside = token < total_len
    sample = _sample_of(offsets, token, inside, batch_size, steps)
    is_real = inside & (sample < batch_size)
    start = tl.load(offsets + sample, mask=is_real, other=0)
    own_targets = tl.load(num_targets + sample, mask=is_real, other=0)
    history_end = tl.load(lengths + sample, mask=is_real, other=0) - own_targets
    targets = tl.load(targets_until + sample, mask=is_real, other=0) - own_targets  # of earlier samples
    position = token - start
    before = batch_size * contextual
    row = before + (start - sample * contextual - targets) + position - contextual
    row = tl.where(position < contextual, sample * contextual + position, row)
    row = tl.where(position >= history_end, before + history_rows + targets + position - history_end, row)
    tl.store(sample_ids + token, tl.minimum(sample, batch_size - 1), mask=inside)
    tl.store(positions + token, position, mask=inside)
    tl.store(rows + token, row, mask=inside)
    tl.store(tokens + row, token, mask=is_real & (row >= 0) & (row < total_len))


@triton.jit(do_not_specialize=["total_len", "batch_size", "steps", "contextual"])
def source_kernel(
    offsets, source_offsets, first, dropped, index,
    total_len, batch_size, steps, contextual,
    DROPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """index [total_len]: where each token of a derived layout comes from. It has one run of each sample, from
    token `first` [B] on; behind the contextual tokens it leaves out `dropped` [B] more."""
    token = (tl.program_id(0) * LANES + tl.arange(0, LANES)).to(tl.int64)
    inside = token < total_len
    sample = _sample_of(offsets, token, inside, batch_size, steps)
    is_real = inside & (sample < batch_size)
    position = token - tl.load(offsets + sample, mask=is_real, other=0)
    source = tl.load(source_offsets + sample, mask=is_real, other=0) + position
    source += tl.load(first + sample, mask=is_real, other=0)
    if DROPS:
        missing = tl.load(dropped + sample, mask=is_real & (position >= contextual), other=0)
        source += missing
    tl.store(index + token, source, mask=inside)


@triton.jit(do_not_specialize=["total_len", "first_event", "first_candidate"])
def times_kernel(
    rows, sample_ids, positions, lengths, num_targets, request_times, events, candidates, times,
    total_len, first_event, first_candidate,
    PER_EVENT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """times [total_len, 3]: a token's own time, that of the next one and that of its request. `rows`: as
    `tokens_kernel` makes them; those from `first_event` on are of events, `PER_EVENT` each, those from
    `first_candidate` on of candidates."""
    token = (tl.program_id(0) * LANES + tl.arange(0, LANES)).to(tl.int64)
    inside = token < total_len
    sample = tl.load(sample_ids + token, mask=inside, other=0)
    row, position = (
        tl.load(rows + token, mask=inside, other=0),
        tl.load(positions + token, mask=inside, other=0),
    )
    history_end = tl.load(lengths + sample, mask=inside, other=0)
    history_end -= tl.load(num_targets + sample, mask=inside, other=0)
    asked = tl.load(request_times + sample, mask=inside, other=0)
    is_event = inside & (row >= first_event) & (row < first_candidate)
    is_candidate = inside & (row >= first_candidate)
    event = (row - first_event) // PER_EVENT
    own = tl.load(events + event, mask=is_event, other=0)
    after = tl.load(events + event + 1, mask=is_event & (position + 1 < history_end), other=0)
    after = tl.where(position + 1 < history_end, after, asked)
    if PER_EVENT == 2:  # what comes after the content of an event is its action, at the same time
        after = tl.where((row - first_event) % 2 == 0, own, after)
    wanted = tl.load(candidates + row - first_candidate, mask=is_candidate, other=0)
    place = times + token * 3
    tl.store(place, tl.where(is_candidate, wanted, tl.where(is_event, own, asked)), mask=inside)
    tl.store(place + 1, tl.where(is_candidate, wanted, tl.where(is_event, after, asked)), mask=inside)
    tl.store(place + 2, tl.where(is_candidate, wanted, asked), mask=inside)


@triton.jit(
    do_not_specialize=[
        "total_len",
        "contextual",
        "last_position",
        "num_buckets",
        "unit",
        "stride",
        "stride_of_requests",
    ]
)
def buckets_kernel(
    sample_ids, positions, lengths, num_targets, times, request_times, of_position, of_time,
    total_len, contextual, last_position, num_buckets, unit, stride, stride_of_requests,
    FROM_START: tl.constexpr, TIMED: tl.constexpr, LOGARITHMIC: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """of_position, of_time [total_len]: the rows of the tables of `recsys.modules.positional`."""
    token = (tl.program_id(0) * LANES + tl.arange(0, LANES)).to(tl.int64)
    inside = token < total_len
    sample = tl.load(sample_ids + token, mask=inside, other=0)
    index = tl.load(positions + token, mask=inside, other=0)
    history_end = tl.load(lengths + sample, mask=inside, other=0)
    history_end -= tl.load(num_targets + sample, mask=inside, other=0)
    position = tl.minimum(index, history_end)
    if not FROM_START:
        position = tl.where(index < contextual, index, contextual + history_end - position)
    tl.store(of_position + token, tl.minimum(position, last_position), mask=inside)
    if TIMED:
        age = tl.load(request_times + token * stride_of_requests, mask=inside, other=0)
        age -= tl.load(times + token * stride, mask=inside, other=0)
        units = age.to(tl.float64) / (token * 0 + unit).to(tl.float64)
        if LOGARITHMIC:
            bucket = tl.log(tl.maximum(units, 1.0)).to(tl.int64)
        else:
            bucket = tl.sqrt(tl.maximum(units, 0.0)).to(tl.int64)
        bucket = tl.where(index < contextual, num_buckets, tl.minimum(bucket, num_buckets - 1))
        tl.store(of_time + token, bucket, mask=inside)
