"""Kernels of norm, gate and dropout for a group of columns, forward and backward, in float32.

    y = u n,    n = x w + b,    x = (a - mean) / sqrt(variance + eps)
    dn = u dy,  du = n dy,      dx = w dn,      da = (dx - mean(dx) - x mean(x dx)) / sqrt(variance + eps)
    dw = sum over rows of x dn, db = sum over rows of dn

With CONCAT the output is [u, a, y]; du and da then include the gradients of their copies. Dropout acts on the
output, so backward drops the same entries of the output's gradient. With SILU, the argument u is the value
before its activation. Backward computes statistics, activation and random bits again, which is cheaper than
reading them.
"""

import triton
import triton.language as tl

from recsys.ops.gated_norm import counter

# Kernels can read module constants only as constexpr.
FIRST_MULTIPLIER = tl.constexpr(counter.MULTIPLIERS[0])
SECOND_MULTIPLIER = tl.constexpr(counter.MULTIPLIERS[1])
FIRST_SHIFT = tl.constexpr(counter.SHIFTS[0])
SECOND_SHIFT = tl.constexpr(counter.SHIFTS[1])
THIRD_SHIFT = tl.constexpr(counter.SHIFTS[2])
COLUMN_STEP = tl.constexpr(counter.COLUMN_STEP)


@triton.jit
def _mix(bits):
    """Computes `counter`'s `mix` on uint32."""
    bits = (bits ^ (bits >> FIRST_SHIFT)) * tl.cast(FIRST_MULTIPLIER, tl.uint32)
    bits = (bits ^ (bits >> SECOND_SHIFT)) * tl.cast(SECOND_MULTIPLIER, tl.uint32)
    return bits ^ (bits >> THIRD_SHIFT)


@triton.jit
def _keys(seed, row):
    """Returns the keys of rows, uint32, from which the random bits of their entries follow."""
    seed = tl.load(seed)
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    return _mix(_mix(row.to(tl.uint32) ^ low) + high)


@triton.jit
def _dropped(value, keys, column, THRESHOLD: tl.constexpr, SCALE: tl.constexpr):
    """Returns `value` after dropout; `column` counts columns of the output."""
    if SCALE == 1.0:
        return value
    else:
        bits = _mix(keys + column.to(tl.uint32) * tl.cast(COLUMN_STEP, tl.uint32))
        return tl.where(bits >= tl.cast(THRESHOLD, tl.uint32), value * SCALE, 0.0)


@triton.jit
def _normed(a, inside, GROUP: tl.constexpr, EPS: tl.constexpr):
    """Returns x [M, BLOCK], zero outside the group, and 1 / sqrt(variance + eps) [M, 1]."""
    centred = tl.where(inside, a - tl.sum(a, 1, keep_dims=True) / GROUP, 0.0)
    factor = 1.0 / tl.sqrt(tl.sum(centred * centred, 1, keep_dims=True) / GROUP + EPS)
    return centred * factor, factor


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["num_rows"])
def forward_kernel(
    attended, u, weight, bias, seed, out, num_rows,
    STRIDE_A: tl.constexpr, STRIDE_U: tl.constexpr,
    W: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
    CONCAT: tl.constexpr, EPS: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """Writes out [T, W] or [T, 3 W], contiguous. One program runs per group and BLOCK_M rows, groups
    fastest."""
    GROUPS: tl.constexpr = W // GROUP
    row = (tl.program_id(0) // GROUPS) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    place = tl.arange(0, BLOCK)[None, :]
    column = (tl.program_id(0) % GROUPS) * GROUP + place
    inside = (row < num_rows) & (place < GROUP)
    long_row = row.to(tl.int64)
    a = tl.load(attended + long_row * STRIDE_A + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(u + long_row * STRIDE_U + column, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        factor *= _sigmoid(factor)
    x, _ = _normed(a, inside, GROUP, EPS)
    scale = tl.load(weight + column, mask=place < GROUP, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=place < GROUP, other=0.0).to(tl.float32)
    y = factor * (x * scale + shift)
    keys = row.to(tl.uint32)
    if SCALE != 1.0:
        keys = _keys(seed, row)
    if CONCAT:
        pointer = out + long_row * (3 * W) + column
        tl.store(pointer, _dropped(factor, keys, column, THRESHOLD, SCALE), mask=inside)
        tl.store(pointer + W, _dropped(a, keys, column + W, THRESHOLD, SCALE), mask=inside)
        tl.store(pointer + 2 * W, _dropped(y, keys, column + 2 * W, THRESHOLD, SCALE), mask=inside)
    else:
        tl.store(out + long_row * W + column, _dropped(y, keys, column, THRESHOLD, SCALE), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_workers"])
def backward_kernel(
    grad_out, attended, u, weight, bias, seed, grad_a, grad_u, sums, num_rows, num_workers,
    STRIDE_O: tl.constexpr, STRIDE_A: tl.constexpr, STRIDE_U: tl.constexpr, STRIDE_GU: tl.constexpr,
    W: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
    CONCAT: tl.constexpr, EPS: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """Writes grad_a [T, W], contiguous, grad_u [T, W], and sums [num_workers, 2, W] float32: dw and db over
    the rows of each worker.

    Each group has `num_workers` workers, groups fastest; a worker takes every num_workers-th block of rows.
    """
    GROUPS: tl.constexpr = W // GROUP
    worker = tl.program_id(0) // GROUPS
    place = tl.arange(0, BLOCK)[None, :]
    column = (tl.program_id(0) % GROUPS) * GROUP + place
    scale = tl.load(weight + column, mask=place < GROUP, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=place < GROUP, other=0.0).to(tl.float32)
    grad_scale = tl.zeros([BLOCK_M, BLOCK], tl.float32)
    grad_shift = tl.zeros([BLOCK_M, BLOCK], tl.float32)
    # The column of y in the output. With CONCAT the copies of u and a are 2 W and W columns before it.
    in_out = column + 2 * W if CONCAT else column
    row = worker * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    inside = (row < num_rows) & (place < GROUP)
    long_row = row.to(tl.int64)
    next_a = tl.load(attended + long_row * STRIDE_A + column, mask=inside, other=0.0)
    next_u = tl.load(u + long_row * STRIDE_U + column, mask=inside, other=0.0)
    given = grad_out + long_row * STRIDE_O + in_out
    next_y = tl.load(given, mask=inside, other=0.0)
    if CONCAT:
        next_to_u = tl.load(given - 2 * W, mask=inside, other=0.0)
        next_to_a = tl.load(given - W, mask=inside, other=0.0)
    for block in range(worker, tl.cdiv(num_rows, BLOCK_M), num_workers):
        a, factor, grad_y = next_a.to(tl.float32), next_u.to(tl.float32), next_y.to(tl.float32)
        row = block * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        inside = (row < num_rows) & (place < GROUP)
        long_row = row.to(tl.int64)
        if CONCAT:
            copied_u, copied_a = next_to_u.to(tl.float32), next_to_a.to(tl.float32)
        # Load the next block while computing this one.
        next_row = long_row + num_workers * BLOCK_M
        next_inside = (next_row < num_rows) & (place < GROUP)
        next_a = tl.load(attended + next_row * STRIDE_A + column, mask=next_inside, other=0.0)
        next_u = tl.load(u + next_row * STRIDE_U + column, mask=next_inside, other=0.0)
        given = grad_out + next_row * STRIDE_O + in_out
        next_y = tl.load(given, mask=next_inside, other=0.0)
        if CONCAT:
            next_to_u = tl.load(given - 2 * W, mask=next_inside, other=0.0)
            next_to_a = tl.load(given - W, mask=next_inside, other=0.0)
        slope = 1.0
        if SILU:
            part = _sigmoid(factor)
            slope = part * (1.0 + factor * (1.0 - part))
            factor *= part
        keys = row.to(tl.uint32)
        if SCALE != 1.0:
            keys = _keys(seed, row)
        grad_y = _dropped(grad_y, keys, in_out, THRESHOLD, SCALE)
        x, deviation = _normed(a, inside, GROUP, EPS)
        grad_n = factor * grad_y
        grad_scale += x * grad_n
        grad_shift += grad_n
        grad_x = scale * grad_n
        mean = tl.sum(grad_x, 1, keep_dims=True) / GROUP
        along = tl.sum(grad_x * x, 1, keep_dims=True) / GROUP
        to_a = (grad_x - mean - x * along) * deviation
        to_u = grad_y * (x * scale + shift)
        if CONCAT:
            to_u += _dropped(copied_u, keys, column, THRESHOLD, SCALE)
            to_a += _dropped(copied_a, keys, column + W, THRESHOLD, SCALE)
        tl.store(grad_a + long_row * W + column, to_a, mask=inside)
        tl.store(grad_u + long_row * STRIDE_GU + column, to_u * slope, mask=inside)
    pointer = sums + worker.to(tl.int64) * (2 * W) + column
    tl.store(pointer, tl.sum(grad_scale, 0, keep_dims=True), mask=place < GROUP)
    tl.store(pointer + W, tl.sum(grad_shift, 0, keep_dims=True), mask=place < GROUP)
