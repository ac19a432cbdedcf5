"""Kernels of layer norm, forward and backward, in float32.

    n = y w + b,    y = (x - mean) / sqrt(variance + eps)
    dy = w dn,      dx = (dy - mean(dy) - y mean(y dy)) / sqrt(variance + eps) + (gradient of a residual sum)
    dw = sum over rows of y dn, db = sum over rows of dn

Backward reads x anyway, so it computes the statistics again.
"""

import triton
import triton.language as tl


@triton.jit
def _normed(x, inside, W: tl.constexpr, EPS: tl.constexpr):
    """Returns y [M, BLOCK], zero outside, and 1 / sqrt(variance + eps) [M, 1]."""
    centred = tl.where(inside, x - tl.sum(x, 1, keep_dims=True) / W, 0.0)
    factor = 1.0 / tl.sqrt(tl.sum(centred * centred, 1, keep_dims=True) / W + EPS)
    return centred * factor, factor


@triton.jit(do_not_specialize=["num_rows"])
def forward_kernel(
    x, weight, bias, out, num_rows,
    STRIDE: tl.constexpr, W: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Writes out [T, W], contiguous; rows of x are STRIDE elements apart. One program runs per BLOCK_M
    rows."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows) & (column < W)
    long_row = row.to(tl.int64)
    given = tl.load(x + long_row * STRIDE + column, mask=inside, other=0.0).to(tl.float32)
    y, _ = _normed(given, inside, W, EPS)
    scale = tl.load(weight + column, mask=column < W, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=column < W, other=0.0).to(tl.float32)
    tl.store(out + long_row * W + column, y * scale + shift, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_workers"])
def backward_kernel(
    grad_n, x, residual, weight, grad_x, sums, num_rows, num_workers,
    STRIDE: tl.constexpr, STRIDE_R: tl.constexpr, W: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Writes grad_x [T, W], contiguous like grad_n, and sums [num_workers, 2, W] float32: dw and db over the
    rows of each worker.

    A worker takes every num_workers-th block of rows. `residual`, with rows STRIDE_R elements apart, is added
    to grad_x.
    """
    worker = tl.program_id(0)
    column = tl.arange(0, BLOCK)[None, :]
    scale = tl.load(weight + column, mask=column < W, other=0.0).to(tl.float32)
    grad_scale = tl.zeros([BLOCK_M, BLOCK], tl.float32)
    grad_shift = tl.zeros([BLOCK_M, BLOCK], tl.float32)
    row = worker * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    inside = (row < num_rows) & (column < W)
    long_row = row.to(tl.int64)
    next_x = tl.load(x + long_row * STRIDE + column, mask=inside, other=0.0)
    next_grad = tl.load(grad_n + long_row * W + column, mask=inside, other=0.0)
    next_added = tl.load(residual + long_row * STRIDE_R + column, mask=inside, other=0.0)
    for block in range(worker, tl.cdiv(num_rows, BLOCK_M), num_workers):
        given, grad = next_x.to(tl.float32), next_grad.to(tl.float32)
        added = next_added.to(tl.float32)
        row = block * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        inside = (row < num_rows) & (column < W)
        # Load the next block while computing this one.
        next_row = row.to(tl.int64) + num_workers * BLOCK_M
        next_inside = (next_row < num_rows) & (column < W)
        next_x = tl.load(x + next_row * STRIDE + column, mask=next_inside, other=0.0)
        next_grad = tl.load(grad_n + next_row * W + column, mask=next_inside, other=0.0)
        next_added = tl.load(residual + next_row * STRIDE_R + column, mask=next_inside, other=0.0)
        y, deviation = _normed(given, inside, W, EPS)
        grad_scale += y * grad
        grad_shift += grad
        grad_y = scale * grad
        mean = tl.sum(grad_y, 1, keep_dims=True) / W
        along = tl.sum(grad_y * y, 1, keep_dims=True) / W
        total = (grad_y - mean - y * along) * deviation + added
        tl.store(grad_x + row.to(tl.int64) * W + column, total, mask=inside)
    pointer = sums + worker.to(tl.int64) * (2 * W) + column
    tl.store(pointer, tl.sum(grad_scale, 0, keep_dims=True), mask=column < W)
    tl.store(pointer + W, tl.sum(grad_shift, 0, keep_dims=True), mask=column < W)
