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
from recsys.ops.top_k.keys import items_of, keys_of, scores_of


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
        codes: int64, the last code.
    """

    beams: Beams
    origins: Tensor
    codes: Tensor


class SeenEdges(NamedTuple):
    """The edges of one level on the paths to seen items, [S] each.

    Attributes:
        row: int64, the row.
        edge: int64, the edge.
        weight: int32, 1, or 0 for no item and for one that stands earlier too.
    """

    row: Tensor
    edge: Tensor
    weight: Tensor


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
    beams = Beams(torch.zeros_like(root, dtype=torch.float32), root)
    for level, edges in enumerate(_edges(trie, seen)):
        logits = decoder.advance(level, token, cache, memories)
        extended = extend_beams(logits, beams, trie, level, min(width, trie.counts[level]), edges)
        beams, origins = extended.beams, extended.origins[..., None]
        if level + 1 < trie.levels:
            cache = select_paths(
                cache, lambda paths, at=origins: paths.gather(1, at.expand(-1, -1, paths.shape[2]))
            )
            token = decoder.embed.level(level, extended.codes)
    items = trie.item[beams.nodes.clamp(min=0)].long()
    return FoundItems(beams.scores, torch.where(beams.nodes < 0, -1, items))


def extend_beams(
    logits: Tensor, beams: Beams, trie: CodeTrie, level: int, width: int, seen: SeenEdges
) -> Extended:
    """Adds one code to every beam and keeps the best: log-softmax, codes of the trie, the top of each row.

    Args:
        logits: float32 [B, K, V].
        beams: prefixes of depth `level`, [B, K].
        trie: the codes of all items.
        level: the level of the new code.
        width: W, number of prefixes to keep; at most the number of edges of the level.
        seen: edges on the paths to seen items.
    """
    first, alive = trie.first(level).long(), beams.nodes >= 0
    node = beams.nodes.clamp(min=0)
    begin, end = first[node], torch.where(alive, first[node + 1], 0)
    edge = begin[..., None] + torch.arange(trie.most_children[level], device=node.device)
    is_edge = edge < end[..., None]
    edge = edge.clamp(max=trie.counts[level] - 1)
    left = trie.items(level)[edge] - _count_seen(beams.nodes, begin, edge, trie.parent(level), seen)
    code = trie.token(level)[edge].long()
    scores = (beams.scores - logits.logsumexp(2))[..., None] + logits.gather(2, code)
    scores = torch.where(is_edge & (left > 0), scores, -torch.inf).flatten(1)
    keys = keys_of(scores, torch.arange(scores.shape[1], device=node.device))
    best = torch.topk(keys, width, dim=1).values
    place, scores = items_of(best), scores_of(best)
    nodes = torch.where(scores == -torch.inf, -1, edge.flatten(1).gather(1, place))
    origins = torch.div(place, edge.shape[2], rounding_mode="floor")
    return Extended(Beams(scores, nodes), origins, code.flatten(1).gather(1, place))


def _count_seen(nodes: Tensor, begin: Tensor, edge: Tensor, parent: Tensor, seen: SeenEdges) -> Tensor:
    """Counts the seen items below each edge, int32 [B, K, children].

    A row's beams are different nodes, so an edge belongs to at most one of them.
    """
    hit = nodes[seen.row] == parent[seen.edge][:, None]
    beam = hit.int().argmax(1)
    child = seen.edge - begin[seen.row, beam]
    weight = torch.where(hit.any(1), seen.weight, 0)
    place = (seen.row * edge.shape[1] + beam) * edge.shape[2] + torch.where(weight > 0, child, 0)
    counts = torch.zeros(edge.shape, dtype=torch.int32, device=edge.device)
    return counts.view(-1).index_add(0, place, weight).view(edge.shape)


def _edges(trie: CodeTrie, seen: SeenItems) -> list[SeenEdges]:
    """Returns for each level the edges to the seen items; an item that stands twice counts once."""
    items = trie.leaf.shape[0]
    order = (seen.row * (items + 1) + seen.item + 1).sort().indices
    row, item = seen.row[order], seen.item[order]
    before = torch.cat([item.new_full((1,), -1), row * (items + 1) + item])[:-1]
    weight = ((item >= 0) & (row * (items + 1) + item != before)).int()
    return [SeenEdges(row, edge, weight) for edge in trie.path(item.clamp(min=0))]
