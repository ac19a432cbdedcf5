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
