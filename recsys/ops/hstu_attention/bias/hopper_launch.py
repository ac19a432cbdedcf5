"""Launches `hopper_kernel`: all gradients of attention with a bias, summed in any order."""

from __future__ import annotations

import torch
from torch import Tensor

from recsys.ops.hstu_attention.bias.hopper_kernel import biased_kernel
from recsys.ops.hstu_attention.bias.packed_launch import (
    bias_constants,
    finished,
    launch_with_declared_memory,
    tables_constants,
    zero_sums,
)
from recsys.ops.hstu_attention.hopper.launch import WARPS, round_to, rules, section_of
from recsys.ops.hstu_attention.problem import Gradients, Problem
from recsys.ops.hstu_attention.triton.block_sizes import Blocks
from recsys.ops.hstu_attention.triton.launch import (
    operands,
    parts_of,
    scalars,
    strides,
)
from recsys.ops.hstu_attention.work_list import key_work
from recsys.ops.relative_bias import RelativeBias
from recsys.ops.runtime.descriptors import gluon_descriptor
from recsys.ops.runtime.gluon_pieces import STRIP
from recsys.ops.runtime.launch import unwrapped

BLOCKS = Blocks(rows=STRIP.value, keys=STRIP.value, num_warps=WARPS, num_stages=2)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    out: Gradients,
    problem: Problem,
    bias: RelativeBias,
) -> Gradients:
    """Fills in `out` and adds the gradients of the tables; the tensors must satisfy `can_describe`.

    Needs 256 bytes of temporary memory per token and head.
    """
    num_tokens, num_heads, dim = q.shape
    section = section_of(8 * num_heads * dim, problem.mask)  # q and dO in 16 bits, and float32 sums
    if section is not None and section >= num_tokens:
        section = None  # a single section needs no list of its own
    items = key_work(problem.mask, problem.layout, BLOCKS.keys, BLOCKS.rows, section)
    sums = zero_sums(q, problem.layout.max_len, bias)
    rows = q.new_zeros(num_tokens, num_heads, dim, dtype=torch.float32)
    compiled_for = {
        **rules(problem.mask),
        **bias_constants(True, rows_first=False, sums=True),
        **tables_constants(sums),
        "num_warps": WARPS,
    }
    for part, of_bias in parts_of(problem, items, BLOCKS, unwrapped, True, rows_first=False, section=section):
        arguments = [
            *operands(True, *((tensor, STRIP.value) for tensor in (q, k, v, grad_out, rows))),
            out.k,
            out.v,
            part,
            num_heads,
            *strides(q, k, v, grad_out)[1::2],
            *scalars(problem),
            *of_bias,
            *sums,
            sums.by_bucket.shape[0],
        ]
        programs = part.shape[0] * num_heads
        launch_with_declared_memory(biased_kernel, programs, arguments, compiled_for, gluon_descriptor)
    round_to(out.q, rows, 0.5 * problem.alpha / problem.scale_len)
    position_table, time_table = finished(sums, problem.scale_len, bias)
    return out._replace(position_table=position_table, time_table=time_table)
