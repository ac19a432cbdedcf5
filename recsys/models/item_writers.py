"""The writers of a generator with the codes of items: they score items, rank targets, and search."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from recsys import protos as pb
from recsys.data.batch import Batch
from recsys.models.ranking import rank_targets
from recsys.models.retriever import MAX_SCORES
from recsys.modules.beam_search import FoundItems, SeenItems, beam_search
from recsys.modules.better_items import better_items
from recsys.modules.code_decoder import CodeDecoder, CodeEmbedding
from recsys.modules.code_encoder import EncodedCodes
from recsys.modules.code_trie import CodeTrie
from recsys.modules.parallel_codes import ParallelCodes

MAX_NUMBERS = 2**25
"""Numbers of the widest level of exact scoring that are in memory at once: 128 MiB of float32."""

Histories = Tensor | EncodedCodes
"""States of B rows, [B, E], or their encoded histories."""


class SequentialItems(CodeDecoder):
    """A decoder that writes the codes of an item one after another, with the trie of items.

    Args:
        config, sizes, embed, width, has_memory: as for `CodeDecoder`.
        codes: int64 [items, levels].
        is_listed: bool [items], the items that may be found; None for all.
    """

    def __init__(
        self,
        config: pb.CodeDecoder,
        sizes: tuple[int, ...],
        embed: CodeEmbedding,
        width: int,
        codes: np.ndarray,
        *,
        is_listed: np.ndarray | None = None,
        has_memory: bool = False,
    ):
        super().__init__(config, sizes, embed, width, has_memory=has_memory)
        self.trie = CodeTrie(codes, sizes, None if is_listed is None else np.flatnonzero(is_listed))

    def score_items(self, histories: Histories) -> Tensor:
        """Returns log P(item) of every item, float32 [B, V], -inf if not listed; see `CodeDecoder.scores`."""
        return self.scores(histories, self.trie)

    def score_in_parts(self, histories: Histories) -> Iterator[Tensor]:
        """Yields the results of `score_items` for a few rows at a time, which bounds the memory in use."""
        trie, is_state = self.trie, isinstance(histories, Tensor)
        rows = len(histories) if is_state else histories.layout.batch_size
        at_a_time = max(1, MAX_NUMBERS // (len(trie.leaf) * max(*trie.sizes, self.positions.shape[1])))
        for start in range(0, max(1, rows), at_a_time):
            stop = min(start + at_a_time, rows)
            yield self.score_items(histories[start:stop] if is_state else histories.part(start, stop))

    def find(self, histories: Histories, width: int, seen: SeenItems) -> FoundItems:
        """Finds the best items; see `beam_search`."""
        return beam_search(self, self.trie, histories, width, seen)

    def ranks(self, histories: Histories, targets: Tensor, batch: Batch) -> Tensor:
        """Returns the exact rank of each target, int64 [N], as `rank_targets` defines it.

        Args:
            histories: states [B, E], or B encoded histories. For the latter all items are scored.
            targets: int64 [N], rows of the item table.
            batch: says which targets belong to which row, and which items the rows have seen.
        """
        if not isinstance(histories, Tensor):
            return rank_scores(torch.cat(list(self.score_in_parts(histories))), targets, batch)
        row = rows_of(batch.num_candidates, len(targets))
        item, items = (targets - 1).clamp(min=0), len(self.trie.leaf)
        is_listed = self.trie.leaf[item] < len(self.trie.item)
        # Any item of the trie stands in for targets that cannot be found.
        pairs = better_items(self, self.trie, histories[row], torch.where(is_listed, item, self.trie.item[0]))
        # Keys of (row, item), to drop the items that a row has seen.
        seen = (rows_of(batch.seen_layout.lengths, len(batch.seen)) * (items + 1) + batch.seen).sort().values
        keys = row[pairs.target] * (items + 1) + pairs.item + 1
        place = torch.searchsorted(seen, keys)
        is_seen = torch.cat([seen, seen.new_full((1,), -1)])[place] == keys
        others = ~is_seen & (pairs.item + 1 != targets[pairs.target])
        better = torch.zeros_like(targets).index_add(0, pairs.target, others.long())
        return torch.where((targets > 0) & is_listed & ~batch.repeated, 1 + better, items + 1)


class ParallelItems(ParallelCodes):
    """Heads that predict all codes of an item at once, with the codes of all items.

    Args:
        config, sizes, embed, width: as for `ParallelCodes`.
        codes: int64 [items, codes].
    """

    of_items: Tensor

    def __init__(
        self,
        config: pb.ParallelCodes,
        sizes: tuple[int, ...],
        embed: CodeEmbedding,
        width: int,
        codes: np.ndarray,
    ):
        super().__init__(config, sizes, embed, width)
        self.register_buffer("of_items", torch.from_numpy(codes), persistent=False)

    def score_items(self, states: Tensor) -> Tensor:
        """Returns log P(item) of every item, float32 [B, V]."""
        return self.scores(states, self.of_items)

    def find(self, states: Tensor, width: int, seen: SeenItems) -> FoundItems:
        """Raises ValueError: codes without an order have no prefixes. The config's check says so first."""
        raise ValueError("parallel codes have no prefixes to search")


def rank_scores(scores: Tensor, targets: Tensor, batch: Batch) -> Tensor:
    """Returns the rank of each target by the scores of all items, int64 [N], as `rank_targets` defines it.

    Args:
        scores: float32 [B, V]; -inf for items that cannot be found.
        targets, batch: as for `SequentialItems.ranks`.
    """
    row = rows_of(batch.num_candidates, len(targets))
    is_lost = scores[row, (targets - 1).clamp(min=0)] == -torch.inf
    return rank_targets(
        scores,
        None,
        targets=targets,
        num_targets=batch.num_candidates,
        removed=batch.seen,
        removed_layout=batch.seen_layout,
        missed=batch.repeated | is_lost,
        max_scores=MAX_SCORES,
    )


def rows_of(counts: Tensor, total: int) -> Tensor:
    """Returns the row of each of `total` entries, of which row b has `counts[b]`."""
    rows = torch.arange(counts.shape[0], device=counts.device)
    return torch.repeat_interleave(rows, counts, output_size=total)
