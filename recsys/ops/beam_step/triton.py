"""Kernels of `beam_step`: the keys of all extensions of a beam, and the beams that the best keys stand for.

A key is that of `recsys.ops.top_k.keys_of`: the score's bits in an order that rises with the score, above
2^32 - 1 minus the place of the extension, beam * CHILDREN + edge of the beam's node.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recsys.ops.beam_step import Beams, Extended, SeenLeaves, TrieEdges
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


LAST_PLACE = tl.constexpr(2**32 - 1)


@triton.jit
def _seen_before(keys, before, num_seen, wanted):
    """Returns the number of different keys below each of `wanted`, by binary search."""
    low = wanted * 0
    high = low + num_seen
    span = num_seen
    while span > 0:
        middle = (low + high) // 2
        is_open = low < high
        is_below = tl.load(keys + middle, mask=is_open, other=0) < wanted
        low = tl.where(is_open & is_below, middle + 1, low)
        high = tl.where(is_open & ~is_below, middle, high)
        span = span // 2
    return tl.load(before + low)


@triton.jit(do_not_specialize=["num_beams", "num_leaves", "num_seen"])
def score_kernel(
    logits, scores, nodes, first, token, leaves, seen_keys, seen_before, out, num_beams, num_leaves, num_seen,
    V: tl.constexpr, BLOCK_V: tl.constexpr, CHILDREN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes out [B, K, CHILDREN] int64, the keys of all extensions. One program runs per beam."""
    program = tl.program_id(0).to(tl.int64)
    row = program // num_beams
    node = tl.load(nodes + program)
    value = tl.arange(0, BLOCK_V)
    x = tl.load(logits + program * V + value, mask=value < V, other=float("-inf")).to(tl.float32)
    top = tl.max(x, 0)
    base = tl.load(scores + program) - (top + tl.log(tl.sum(tl.exp(x - top), 0)))
    begin = tl.load(first + tl.maximum(node, 0))
    end = tl.where(node < 0, begin, tl.load(first + tl.maximum(node, 0) + 1))
    child = tl.arange(0, BLOCK)
    edge = begin + child
    is_edge = edge < end
    code = tl.load(token + edge, mask=is_edge, other=0)
    score = base + tl.load(logits + program * V + code, mask=is_edge, other=0.0).to(tl.float32)
    if num_seen > 0:
        offset = row * (num_leaves + 1)
        low = tl.load(leaves + begin)
        high = tl.load(leaves + end)
        ahead = _seen_before(seen_keys, seen_before, num_seen, offset + low)
        if _seen_before(seen_keys, seen_before, num_seen, offset + high) > ahead:
            low_leaf = tl.load(leaves + edge, mask=is_edge, other=0)
            high_leaf = tl.load(leaves + edge + 1, mask=is_edge, other=0)
            seen = _seen_before(seen_keys, seen_before, num_seen, offset + high_leaf)
            seen -= _seen_before(seen_keys, seen_before, num_seen, offset + low_leaf)
            is_edge = is_edge & (high_leaf - low_leaf > seen)
    # 0.0 is added because -0.0 must become 0.0, to which it is equal.
    bits = (tl.where(is_edge, score, float("-inf")) + 0.0).to(tl.int32, bitcast=True)
    rising = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    key = (rising << 32) + (LAST_PLACE - ((program % num_beams) * CHILDREN + child))
    tl.store(out + program * CHILDREN + child, key, mask=child < CHILDREN)


@triton.jit(do_not_specialize=["num_beams", "width"])
def read_kernel(
    best, nodes, first, token, out_scores, out_nodes, out_origins, out_codes, num_beams, width,
    CHILDREN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Writes the scores float32, nodes, origins and codes int64 of keys [B, width], the greatest first.

    One program runs per row and BLOCK keys, whose places it finds by comparing them with all keys of the row.
    """
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    index = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = index < width
    key = tl.load(best + row * width + index, mask=inside, other=0)
    rank = tl.zeros([BLOCK], tl.int32)
    for start in range(0, width, STEP):
        rival = start + tl.arange(0, STEP)
        compared = tl.load(best + row * width + rival, mask=rival < width, other=-(2**63))
        rank += tl.sum((compared[None, :] > key[:, None]).to(tl.int32), 1)
    rising = (key >> 32).to(tl.int32)
    score = tl.where(rising < 0, rising ^ 0x7FFFFFFF, rising).to(tl.float32, bitcast=True)
    place = LAST_PLACE - (key & LAST_PLACE)
    origin = place // CHILDREN
    is_beam = inside & (score > float("-inf"))
    node = tl.load(nodes + row * num_beams + origin, mask=is_beam, other=0)
    edge = tl.load(first + node, mask=is_beam, other=0) + place % CHILDREN
    code = tl.load(token + edge, mask=is_beam, other=0)
    to = row * width + rank
    tl.store(out_scores + to, score, mask=inside)
    tl.store(out_nodes + to, tl.where(is_beam, edge, -1), mask=inside)
    tl.store(out_origins + to, origin, mask=inside)
    tl.store(out_codes + to, code.to(tl.int64), mask=inside)
