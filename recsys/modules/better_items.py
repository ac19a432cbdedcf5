"""Finds the items that score at least as much as a target, for exact ranks without scoring every item.

A prefix of codes bounds the scores of all items below it, because log-probabilities are not positive. So only
prefixes that score at least as much as the target are continued. `CodeDecoder.scores` gives the same scores
at the cost of every prefix.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from recsys.modules.code_decoder import Cache, CodeDecoder, select_paths
from recsys.modules.code_trie import CodeTrie

MARGIN, MARGIN_BFLOAT16 = 1e-3, 0.25
"""Prefixes this far below the target are continued too, with float32 and with bfloat16 products: rounding
differs between a target's path alone and the same path among others."""

AT_A_TIME = {"cpu": 2048, "cuda": 131_072}
"""Paths that the decoder continues at once, by device: few enough for the cache of a CPU, where this was
measured, and for the memory of a GPU."""

MOST_CHILDREN = 2**21
"""Children that paths may have in all to be continued at once, or a single path has more. Each that may be as
good as its target keeps its keys and values."""


class Pairs(NamedTuple):
    """Pairs of a target and an item, int64 [P] each."""

    target: Tensor
    item: Tensor


class _Paths(NamedTuple):
    """Prefixes of one depth: the target that each is continued for, its node, its score, and its cache."""

    target: Tensor
    node: Tensor
    score: Tensor
    code: Tensor
    cache: Cache

    def part(self, chosen: slice) -> "_Paths":
        """Returns some of the paths."""
        cache = [[(key[chosen], value[chosen]) for key, value in layer] for layer in self.cache]
        return _Paths(*(tensor[chosen] for tensor in self[:4]), cache)


def better_items(decoder: CodeDecoder, trie: CodeTrie, states: Tensor, targets: Tensor) -> Pairs:
    """Finds for each target all items, itself included, that do not score below it.

    The number of paths depends on the scores, so a GPU waits for the host at every level.

    Args:
        decoder: the decoder, in evaluation mode.
        trie: the codes of all items.
        states: [N, E], the state of the target's row.
        targets: int64 [N], items from 0.
    """
    if not len(targets):
        return Pairs(targets, targets)
    path = trie.path(targets)
    codes = torch.stack([trie.token(level)[edge] for level, edge in enumerate(path)], 1)
    rounded = torch.is_autocast_enabled(states.device.type)
    bound = -trie.levels * decoder(states, codes.long()) - (MARGIN_BFLOAT16 if rounded else MARGIN)
    cache = decoder.empty_cache()
    decoder.advance(0, states, cache)
    search = _Search(decoder, trie, states, [layer[0] for layer in cache], bound, path)
    everyone = torch.arange(len(states), device=states.device)
    start = _Paths(
        everyone, torch.zeros_like(everyone), torch.zeros_like(bound), everyone, [[] for _ in cache]
    )
    leaves = list(search.leaves(0, start))
    target, leaf, score = (torch.cat(tensors) for tensors in zip(*(part[:3] for part in leaves), strict=True))
    item = trie.item[leaf].long()
    itself = item == targets[target]
    least = torch.zeros_like(bound).index_put((target[itself],), score[itself])
    kept = ~(score < least[target])
    return Pairs(target[kept], item[kept])


class _Search(NamedTuple):
    """A search from prefix to prefix.

    Attributes:
        decoder, trie, states: as for `better_items`.
        shared: for each layer of the decoder the keys and values of the states, [N, E].
        bound: float32 [N], the score of each target, less the margin.
        path: for each level the edge on the path to each target, int64 [N]; it is always continued.
    """

    decoder: CodeDecoder
    trie: CodeTrie
    states: Tensor
    shared: list[tuple[Tensor, Tensor]]
    bound: Tensor
    path: list[Tensor]

    def leaves(self, level: int, paths: _Paths) -> Iterator[_Paths]:
        """Yields the paths to items below the given prefixes of depth `level`, part by part."""
        first = self.trie.first(level)
        children = int((first[paths.node + 1] - first[paths.node]).sum())
        few_enough = MOST_CHILDREN * len(paths.node) // max(1, children)
        at_a_time = max(1, min(AT_A_TIME[paths.node.device.type], few_enough))
        for start in range(0, len(paths.node), at_a_time):
            children = self._continued(level, paths.part(slice(start, start + at_a_time)))
            if level + 1 < self.trie.levels:
                yield from self.leaves(level + 1, children)
            else:
                yield children

    def _continued(self, level: int, paths: _Paths) -> _Paths:
        """Returns the children of paths that do not score below the bounds of their targets."""
        logits, cache = self._logits(level, paths)
        first = self.trie.first(level).long()
        begin = first[paths.node]
        children = first[paths.node + 1] - begin
        parent = torch.repeat_interleave(children)
        edge = (
            torch.arange(len(parent), device=parent.device) + (begin - children.cumsum(0) + children)[parent]
        )
        code = self.trie.token(level)[edge].long()
        score = (paths.score - logits.logsumexp(1))[parent] + logits[parent, code]
        target = paths.target[parent]
        kept = (~(score < self.bound[target]) | (edge == self.path[level][target])).nonzero()[:, 0]
        parent = parent[kept]
        if level + 1 < self.trie.levels:
            cache = select_paths(cache, lambda values: values.index_select(0, parent))
        codes = [layer[1:] for layer in cache]
        return _Paths(paths.target[parent], edge[kept], score[kept], code[kept], codes)

    def _logits(self, level: int, paths: _Paths) -> tuple[Tensor, Cache]:
        """Returns the logits of the codes after the paths, and the cache with the last codes of the paths."""
        if level == 0:
            cache = self.decoder.empty_cache()
            return self.decoder.advance(0, self.states[paths.target], cache), cache
        cache = [
            [(key.index_select(0, paths.target), value.index_select(0, paths.target)), *codes]
            for (key, value), codes in zip(self.shared, paths.cache, strict=True)
        ]
        token = self.decoder.embed.level(level - 1, paths.code)
        return self.decoder.advance(level, token, cache), cache
