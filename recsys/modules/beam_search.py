"""Finds the best items of a row by beam search over the trie of all codes.

Every size is fixed by the trie and the width of the beam, so the search can be exported and recorded in a
CUDA graph, for any number of rows. The history is encoded once: the keys and values of its state, or of its
codes, are those of all beams. A level is one call of the decoder and one of `extend_beams`, which a kernel
can replace.

The score of a beam is the model's log-probability of its codes. The softmax of a level goes over all its
values, whether or not an item has them; only then are codes left out that no item has. So scores are those of
`CodeDecoder.scores`, and a beam as wide as the catalogue finds what sorting them finds.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from recsys.modules.code_decoder import CodeDecoder, select_paths
from recsys.modules.code_encoder import EncodedCodes
from recsys.modules.code_trie import CodeTrie
from recsys.ops.beam_step import Beams, Extended, SeenLeaves, TrieEdges, beam_step, runs_on
from recsys.ops.top_k import items_of, keys_of, scores_of


class FoundItems(NamedTuple):
    """The best items of each row, the best first.

    Attributes:
        scores: float32 [B, K], log-probabilities; -inf where a row has fewer than K items left.
        items: int64 [B, K], items from 0; -1 where a row has fewer.
    """

    scores: Tensor
    items: Tensor


class SeenItems(NamedTuple):
    """Items that rows must not find, int64 [S] each; an item may stand several times.

    Attributes:
        row: the row of each.
        item: the item, from 0; -1 for none.
    """

    row: Tensor
    item: Tensor


def beam_search(
    decoder: CodeDecoder, trie: CodeTrie, histories: Tensor | EncodedCodes, width: int, seen: SeenItems
) -> FoundItems:
    """Finds min(width, items) items of each row.

    A prefix all of whose items the row has seen is left out as soon as it is complete, so that the beam never
    shrinks and a row gets as many items as it has left, up to the width. Of equal scores the item that comes
    first in the order of codes is the better one, on every device.

    Args:
        decoder: the decoder, in evaluation mode.
        trie: the codes of all items.
        histories: states [B, E], or B encoded histories.
        width: most prefixes that a row keeps.
        seen: the items to leave out.
    """
    (token, memories), cache = decoder.start(histories), decoder.empty_cache()
    root = token.new_zeros(token.shape[:2], dtype=torch.int64)
    beams, leaves = Beams(torch.zeros_like(root, dtype=torch.float32), root), _seen_leaves(trie, seen)
    for level in range(trie.levels):
        logits = decoder.advance(level, token, cache, memories)
        extended = extend_beams(logits, beams, trie.edges(level), min(width, trie.counts[level]), leaves)
        origins = _within(extended.origins, beams.nodes.shape[1])[..., None]
        beams = extended.beams
        if level + 1 < trie.levels:
            cache = select_paths(
                cache, lambda paths, at=origins: paths.gather(1, at.expand(-1, -1, paths.shape[2]))
            )
            token = decoder.embed.level(level, extended.codes)
    items = trie.item[_within(beams.nodes, trie.item.shape[0])].long()
    return FoundItems(beams.scores, torch.where(beams.nodes < 0, -1, items))


def extend_beams(logits: Tensor, beams: Beams, edges: TrieEdges, width: int, seen: SeenLeaves) -> Extended:
    """Adds one code to every beam and keeps the best: log-softmax, codes of the trie, the top of each row.

    Args:
        logits: float32 [B, K, V].
        beams: prefixes, [B, K].
        edges: the edges of their nodes.
        width: W, number of prefixes to keep; at most the number of edges.
        seen: the items to leave out.
    """
    if runs_on(logits, edges):
        return beam_step(logits, beams, edges, width, seen)
    node, last_edge = _within(beams.nodes, edges.first.shape[0] - 1), edges.token.shape[0] - 1
    device = logits.device
    begin, end = edges.first[node].long(), torch.where(beams.nodes < 0, 0, edges.first[node + 1])
    edge = begin[..., None] + torch.arange(edges.most_children + 1, device=device)
    # Leaves below an edge are consecutive, and so are the places of the seen ones among them.
    leaf = edges.leaves[edge.clamp(max=last_edge + 1)]
    row = torch.arange(node.shape[0], device=device)[:, None, None]
    num_seen = seen.before[torch.searchsorted(seen.keys, row * (edges.num_leaves + 1) + leaf)]
    edge = edge[..., :-1]
    is_left = (edge < end[..., None]) & ((leaf - num_seen).diff(dim=2) > 0)
    code = edges.token[edge.clamp(max=last_edge)].long()
    scores = (beams.scores - logits.logsumexp(2))[..., None] + logits.gather(2, code)
    scores = torch.where(is_left, scores, -torch.inf).flatten(1)
    best = torch.topk(keys_of(scores, torch.arange(scores.shape[1], device=device)), width, dim=1).values
    place, scores = _within(items_of(best), scores.shape[1]), scores_of(best)
    origins = torch.div(place, edges.most_children, rounding_mode="floor")
    nodes = begin.gather(1, origins) + place - origins * edges.most_children
    nodes = torch.where(scores == -torch.inf, -1, nodes)
    return Extended(Beams(scores, nodes), origins, edges.token[_within(nodes, last_edge + 1)].long())


def _within(index: Tensor, size: int) -> Tensor:
    """Returns an index that a search has found, unchanged unless it is -1, which stands for nothing.

    The upper bound is for the compiler of packages: it times each kernel alone on made-up numbers in place of
    what kernels before it have found, and these must not lead outside of a tensor.
    """
    return index.clamp(min=0, max=size - 1)


def _seen_leaves(trie: CodeTrie, seen: SeenItems) -> SeenLeaves:
    leaves = trie.item.shape[0]
    leaf = torch.where(seen.item < 0, leaves, trie.leaf[seen.item.clamp(min=0)])
    keys = (seen.row * (leaves + 1) + leaf).sort().values
    is_new = keys != torch.cat([keys.new_full((1,), -1), keys])[:-1]
    return SeenLeaves(keys, torch.cat([keys.new_zeros(1), is_new.cumsum(0)]).int())
