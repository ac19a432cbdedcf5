"""Scores and reads the extensions of beams over a trie, with two kernels around PyTorch's top-k.

A step of a beam search has some fifty small operations besides the top-k, each of which costs a GPU more in
its launch than in its work. `modules.beam_search` has them in plain PyTorch and calls this module where
kernels run: on CUDA in eager mode, recorded as a CUDA graph or not. Compilers fuse the plain operations.

This module itself needs no Triton: the kernels and their launch are in `triton`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from recsys.ops.runtime import triton_support

MOST_VALUES = 4096
"""The most values of a code, and the most edges of a node: a program holds those of a beam."""

_KERNELS = f"{__name__}.triton"


class TrieEdges(NamedTuple):
    """The edges of one level of a trie, int32, with the nodes in lexicographic order.

    Attributes:
        first: [nodes + 1], the first edge of each node, then the number of edges.
        token: [edges], the code of each edge.
        leaves: [edges + 1], the first leaf below each edge, then the number of leaves.
        num_leaves: L, number of leaves.
        most_children: C, the most edges that a node has.
    """

    first: Tensor
    token: Tensor
    leaves: Tensor
    num_leaves: int
    most_children: int


class Beams(NamedTuple):
    """Prefixes of one depth, [B, K] each, the best first.

    Attributes:
        scores: float32, log-probabilities; -inf for no prefix.
        nodes: int64, nodes of the trie; -1 for no prefix.
    """

    scores: Tensor
    nodes: Tensor


class Extended(NamedTuple):
    """Beams that are one code longer, [B, W].

    Attributes:
        beams: the new prefixes.
        origins: int64, the place among the old beams that each has come from.
        codes: int64, the last code; any for no prefix.
    """

    beams: Beams
    origins: Tensor
    codes: Tensor


class SeenLeaves(NamedTuple):
    """The leaves that rows must not find, of a trie with L leaves.

    Attributes:
        keys: int64 [S], row * (L + 1) + leaf, in rising order; the leaf is L for none.
        before: int32 [S + 1], the number of different keys among the first ones.
    """

    keys: Tensor
    before: Tensor


def runs_on(logits: Tensor, edges: TrieEdges) -> bool:
    """Returns whether `beam_step` can be called with these arguments now."""
    fits = logits.shape[2] <= MOST_VALUES and edges.most_children <= MOST_VALUES
    return fits and triton_support.has_kernels(logits.device)


def beam_step(logits: Tensor, beams: Beams, edges: TrieEdges, width: int, seen: SeenLeaves) -> Extended:
    """Adds one code to every beam and keeps the best `width` of each row, without gradients.

    The score of an extension is that of its beam plus the log-softmax of its code over all values. Only
    edges of the beam's node with an unseen leaf below them count. Of equal scores the first extension, by
    beam and edge, is the better one.

    Args:
        logits: floating point [B, K, V].
        beams: the beams.
        edges: the edges of the nodes of the beams.
        width: W, at most K * C.
        seen: the leaves to leave out.
    """
    return triton_support.load(_KERNELS).run(logits, beams, edges, width, seen)
