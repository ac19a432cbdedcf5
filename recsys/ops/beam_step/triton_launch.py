"""Launches the kernels of `beam_step`."""

from __future__ import annotations

import torch
from torch import Tensor

from recsys.ops.beam_step import Beams, Extended, SeenLeaves, TrieEdges
from recsys.ops.beam_step.triton_kernels import read_kernel, score_kernel
from recsys.ops.runtime.launch import launch
from recsys.ops.runtime.triton_support import block_width

READ, STEP = 32, 128
"""Keys per program of `read_kernel`, and keys with which it compares them at a time."""


def run(logits: Tensor, beams: Beams, edges: TrieEdges, width: int, seen: SeenLeaves) -> Extended:
    """Runs `beam_step`."""
    rows, num_beams, values = logits.shape
    first, token, leaves, num_leaves, children = edges
    keys = logits.new_empty(rows, num_beams * children, dtype=torch.int64)
    if rows:
        numbers = (num_beams, num_leaves, seen.keys.shape[0])
        pointers = (logits.contiguous(), *beams, first, token, leaves, *seen, keys)
        launch(score_kernel, rows * num_beams, pointers, numbers, sizes_of(values, children))
    # Sorting the best keys would take PyTorch as long as finding them.
    best = torch.topk(keys, width, dim=1, sorted=False).values
    new = Beams(best.new_empty(rows, width, dtype=torch.float32), torch.empty_like(best))
    extended = Extended(new, torch.empty_like(best), torch.empty_like(best))
    if rows:
        pointers = (best, beams.nodes, first, token, *new, extended.origins, extended.codes)
        sizes = {"CHILDREN": children, "BLOCK": READ, "STEP": STEP, "num_warps": 4}
        launch(read_kernel, rows * -(-width // READ), pointers, (num_beams, width), sizes)
    return extended


def sizes_of(values: int, children: int) -> dict[str, int]:
    """Returns the compile-time constants of `score_kernel`, by the names of its parameters."""
    block_v, block = (block_width(count) for count in (values, children))
    warps = max(4, max(block_v, block) // 256)
    return {"V": values, "BLOCK_V": block_v, "CHILDREN": children, "BLOCK": block, "num_warps": warps}
