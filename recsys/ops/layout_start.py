"""Starts the kernels of `layout_kernels`: one takes the place of a dozen operations on a number a token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recsys.ops.layout_facts import LayoutFacts
from recsys.ops.layout_kernels import source_kernel, tokens_kernel
from recsys.ops.triton_start import start

LANES = 512
"""Tokens of a program."""


class Tokens(NamedTuple):
    """int64 [T] each; see the methods of `SequenceLayout` of these names."""

    sample_ids: Tensor
    positions: Tensor
    assemble_index: Tensor
    disassemble_index: Tensor


def tokens_of(layout: LayoutFacts) -> Tokens:
    """What a layout on a GPU says of each token."""
    total_len, batch_size = layout.total_len, layout.batch_size
    memory = torch.empty(4, total_len + total_len % 2, dtype=torch.int64, device=layout.device)
    made = Tokens(*memory[:, :total_len].unbind(0))  # at addresses that 16 divides
    if total_len == 0:
        return made
    start(
        tokens_kernel,
        -(-total_len // LANES),
        (layout.offsets, layout.lengths, layout.num_targets, layout.num_targets.cumsum(0), *made),
        (
            total_len,
            batch_size,
            batch_size.bit_length(),
            layout.num_contextual,
            total_len - batch_size * layout.num_contextual - layout.total_targets,
        ),
        {"LANES": LANES, "num_warps": 4},
    )
    return made


def source_rows(
    layout: LayoutFacts, derived: LayoutFacts, first: Tensor, dropped: Tensor | None = None
) -> Tensor:
    """int64 [T of `derived`]: rows of `layout`. See `source_kernel`."""
    total_len, batch_size = derived.total_len, derived.batch_size
    index = torch.empty(total_len, dtype=torch.int64, device=layout.device)
    if total_len == 0:
        return index
    start(
        source_kernel,
        -(-total_len // LANES),
        (derived.offsets, layout.offsets, first, first if dropped is None else dropped, index),
        (total_len, batch_size, batch_size.bit_length(), layout.num_contextual),
        {"DROPS": dropped is not None, "LANES": LANES, "num_warps": 4},
    )
    return index
