"""`CodeGenerator`: writes the codes of the next item, and so gives every item of the catalogue a probability.

The token of an item is made of the embeddings of its codes, so a history of n items is n tokens for any
mixer. Every position is a state from which a writer predicts the codes of the item after it: a small causal
decoder that writes one after another, or heads that predict all codes at once. With `ids`, items have
embeddings of their own too, and scores mix both kinds of probabilities.
No token may know later events: `models.retriever_declaration` rejects masks, positions and times that would
reveal them.

With an `encoder`, a history has a token for each code, and the decoder attends to all of them. There is no
state of a position then: an event that is to be predicted has an encoding of its own, of the events before
it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from recsys import protos as pb
from recsys.config import checks, features
from recsys.config.declarations import model_of
from recsys.config.registry import pick, register
from recsys.data.batch import Batch, LayoutRule
from recsys.data.codes import codes_of_table, listed_items
from recsys.models.base import Losses
from recsys.models.beam_recall import WIDTHS, beam_recall
from recsys.models.item_writers import Histories, ParallelItems, SequentialItems, rank_scores, rows_of
from recsys.models.next_item import NextItemModel, last_of_each, position_weights
from recsys.modules.beam_search import FoundItems, SeenItems
from recsys.modules.code_decoder import CodeEmbedding
from recsys.modules.code_encoder import CodeEncoder
from recsys.modules.item_ids import ItemIds
from recsys.modules.sequence import following

WEIGHTS = tuple(step / 20 for step in range(21))
"""Weights of ids that `weight_gains` compares."""


class Scores(NamedTuple):
    """Log-probabilities of all items, float32 [B, V] each: by their codes, and by their ids if it has any."""

    of_codes: Tensor
    of_ids: Tensor | None


@dataclass(frozen=True, eq=False)
class CodeGeneratorOutputs:
    """The decoder's states and losses at the positions of all histories.

    Attributes:
        states: float32 [U, E], what the decoder reads at each event; None with an encoder.
        losses: float32 [U], the loss of predicting the codes of the item after each event.
        has_target: bool [U], whether a known item follows in the same row and is predicted.
    """

    states: Tensor | None
    losses: Tensor
    has_target: Tensor


@register(pb.CodeGenerator)
class CodeGenerator(NextItemModel):
    """Embeds codes, preprocesses and mixes or encodes them, then writes codes.

    Args:
        config: the model's message, which chooses its parts.
        pipeline: the whole resolved config.

    Raises:
        ValueError: lists every finding of `checks.family_findings`.
        DataError: the bundle is damaged, or has no codes for an item of the vocabulary.
    """

    codes: Tensor
    is_listed: Tensor | None
    """Items that may be found, bool [V]; None for all, or if the trie of the writer holds no other."""

    def __init__(self, config: pb.CodeGenerator, *, pipeline: pb.Pipeline):
        if findings := checks.family_findings(pipeline):
            raise ValueError("\n".join(checks.lines(findings, {})))
        super().__init__(pipeline)
        width = pipeline.model.embedding_dim
        codes, sizes = codes_of_table(pipeline, Path(config.bundle))
        # Row 0 stands for unknown items.
        unknown = np.full((1, len(sizes)), -1)
        self.register_buffer("codes", torch.from_numpy(np.concatenate([unknown, codes])))
        self.history = features.PREFIX[pb.HISTORY] + config.item_feature
        self.candidates = features.PREFIX[pb.CANDIDATE] + config.item_feature
        parallel, init_std = config.HasField("parallel"), pipeline.model.embedding.init_std
        self.embed_codes = CodeEmbedding(sizes, width, init_std, mean=parallel)
        self.encode: CodeEncoder | None = None
        if config.HasField("encoder"):
            most = pipeline.data.max_history_len
            self.encode = CodeEncoder(config.encoder, len(sizes), width, most, init_std)
        else:
            preprocessor, mixer = pick(config.preprocessor), pick(config.mixer)
            self.preprocess = preprocessor.cls(preprocessor.config, pipeline=pipeline)
            self.mix = mixer.cls(mixer.config, embedding_dim=width)
        is_listed = listed_items(pipeline, config.decoding.items) if config.decoding.items else None
        self.decode = _writer(config, sizes, self.embed_codes, width, codes, is_listed)
        masked = None if is_listed is None or not parallel else torch.from_numpy(is_listed)
        self.register_buffer("is_listed", masked, persistent=False)
        self.ids = ItemIds(config.ids, len(codes), width, init_std) if config.HasField("ids") else None
        self.id_weight = config.ids.weight
        self.beam_size = model_of(pipeline).num_found
        self.objective = CodeLoss(config.weight_column)
        self.metric_choices = list(config.metrics)
        self.leaves_out_repeated = config.repeated_targets == pb.Retriever.LEAVE_OUT

    @classmethod
    def layout_rule(cls, config: pb.CodeGenerator, pipeline: pb.Pipeline) -> LayoutRule:
        """Returns the rule by which the reader lays out rows: as histories, if an encoder reads them."""
        if config.HasField("encoder"):
            return LayoutRule(num_contextual=0, targets=False)
        return super().layout_rule(config, pipeline)

    def forward(self, batch: Batch) -> CodeGeneratorOutputs:
        """Returns the states of all events, and the losses of the codes after them."""
        items = batch.ids[self.history].values()
        target = following(items, batch.uih_lengths, last=torch.zeros_like(batch.uih_lengths))
        with self.autocast():
            if self.encode is not None:
                return self._of_prefixes(batch, items, target)
            states = self._states(batch)
            losses = self.decode(states, self.codes[target].clamp(min=0))
            if self.ids is not None:
                losses = losses + self.ids(states, self._tokens(), target)
        return CodeGeneratorOutputs(states.float(), losses, target > 0)

    def score(self, batch: Batch) -> Tensor | FoundItems:
        """Returns the log-probability of each item for each row, float32 [B, V], in the order of the table.

        With beam search it returns the items that it has found, as rows of the table less 1, without
        `batch.seen`. For a row without history it is what the writer says after a state of zeros, or after
        the start token of the encoder.
        """
        with self.autocast():
            histories = self._histories(batch)
            if self.beam_size is not None:
                return self._find(histories, batch)
            return self._mixed(self._scores(histories), self.id_weight)

    def item_vectors(self, batch: Batch) -> Tensor:
        """Returns the codes of all items, float32 [V, levels], which a package keeps with the ids."""
        return self.codes[1:].float()

    def flops(self, batch: Batch) -> int:
        """Counts the FLOP of preprocessor and mixer, or of the encoder, and of the decoder."""
        if self.encode is not None:
            cost = self.encode.cost(batch.layout)
            return cost.flops + self.decode.flops(cost.prefixes, cost.tokens)
        events = batch.uih_timestamps.shape[0]
        ids = 0 if self.ids is None else self.ids.flops(events)
        return self.preprocess.flops(batch) + self.mix.flops(batch.layout) + self.decode.flops(events) + ids

    def ranks(self, outputs: CodeGeneratorOutputs, batch: Batch) -> Tensor:
        """Returns the rank of each candidate in the catalogue by `score`, like `Retriever.ranks`.

        A candidate that a beam search does not find has the rank V + 1.
        """
        targets = batch.ids[self.candidates].values()
        with self.autocast():
            histories = self._histories(batch, outputs.states)
            if isinstance(self.decode, ParallelItems):
                return rank_scores(self._mixed(self._scores(histories), self.id_weight), targets, batch)
            if self.beam_size is None:
                return self.decode.ranks(histories, targets, batch)
            return self._ranks_found(self._find(histories, batch).items, batch)

    def answer_ranks(self, answer: Sequence[Tensor], items: Tensor | None, batch: Batch) -> Tensor:
        """Returns `ranks` for scores of all items, [B, V], or for the items that a beam search has found."""
        if self.beam_size is None:
            return rank_scores(answer[0], batch.ids[self.candidates].values(), batch)
        return self._ranks_found(answer[1], batch)

    def _ranks_found(self, items: Tensor, batch: Batch) -> Tensor:
        """Ranks the candidates among found items, [B, K] rows of the item table less 1, best first."""
        targets = batch.ids[self.candidates].values()
        hit = items[rows_of(batch.num_candidates, len(targets))] == targets[:, None] - 1
        is_hit = hit.any(1) & (targets > 0) & ~batch.repeated
        return torch.where(is_hit, 1 + hit.int().argmax(1), len(self.codes))

    @property
    def evaluation_waits(self) -> bool:
        """True with an encoder, and for exact ranks by the codes of a decoder."""
        writes = isinstance(self.decode, SequentialItems) and self.beam_size is None
        return self.encode is not None or writes

    def exact_recall(self, batch: Batch) -> dict[str, Tensor]:
        """Counts the best `predict.top_k` items that beams of several widths find; see `beam_recall`."""
        with self.autocast():
            histories, widths = self._histories(batch), (*WIDTHS, self.beam_size)
            return beam_recall(self.decode, histories, _seen(batch), self.pipeline.predict.top_k, widths)

    def weight_gains(self, batch: Batch) -> dict[str, Tensor]:
        """Sums NDCG of the candidates at `predict.top_k` for each of `WEIGHTS`."""
        outputs, k = self(batch), self.pipeline.predict.top_k
        with self.autocast():
            scores = self._scores(self._histories(batch, outputs.states))
        targets, gains = batch.ids[self.candidates].values(), {}
        counted = ~batch.repeated if self.leaves_out_repeated else torch.ones_like(batch.repeated)
        for weight in WEIGHTS:
            ranks = rank_scores(self._mixed(scores, weight), targets, batch)
            gain = torch.where((ranks <= k) & counted, 1 / (ranks + 1).double().log2(), 0)
            gains[f"ndcg@{k}/weight_{weight:.2f}"] = torch.stack([gain.sum(), counted.sum().double()])
        return gains

    def _scores(self, histories: Histories) -> Scores:
        """Returns the log-probabilities of all items for each row."""
        of_ids = None if self.ids is None else self.ids.scores(histories, self._tokens())
        return Scores(self.decode.score_items(histories), of_ids)

    def _mixed(self, scores: Scores, weight: float) -> Tensor:
        """Returns the scores of all items, [B, V]; -inf for an item that may not be found.

        The mean over codes varies about as much as the ids.
        """
        mixed = scores.of_codes
        if scores.of_ids is not None:
            mixed = weight * scores.of_ids + (1 - weight) / self.codes.shape[1] * scores.of_codes
        return mixed if self.is_listed is None else mixed.masked_fill(~self.is_listed, -torch.inf)

    def _tokens(self, rows: Tensor | None = None) -> Tensor:
        """Returns the tokens of rows of the item table, [n, E]; those of all known items for None."""
        tokens = self.embed_codes(self.codes[1:] if rows is None else self.codes[rows])
        if self.ids is None:
            return tokens
        return tokens + (self.ids.table.weight[1:] if rows is None else self.ids.table(rows))

    def _find(self, histories: Histories, batch: Batch) -> FoundItems:
        """Returns the best items of each row by beam search, without those that the rows have seen."""
        return self.decode.find(histories, self.beam_size, _seen(batch))

    def _histories(self, batch: Batch, states: Tensor | None = None) -> Histories:
        """Returns the last state of each row, from all states [U, E] if given, or its encoded history."""
        if self.encode is not None:
            return self.encode(self._code_vectors(batch.ids[self.history].values()), batch.layout)
        return last_of_each(self._states(batch) if states is None else states, batch.uih_lengths)

    def _of_prefixes(self, batch: Batch, items: Tensor, target: Tensor) -> CodeGeneratorOutputs:
        """Computes `forward` with an encoder, for the events that are to be predicted.

        Args:
            items: int64 [U], rows of the item table.
            target: int64 [U], those of the items that follow; 0 for none.
        """
        layout, events, last = self.encode.prefixes(batch.layout)
        histories = self.encode(self._code_vectors(items.index_select(0, events)), layout)
        losses = self.decode(histories, self.codes[target.index_select(0, last)].clamp(min=0))
        is_predicted = torch.zeros_like(target, dtype=torch.bool).index_fill(0, last, True)
        return CodeGeneratorOutputs(
            None, losses.new_zeros(len(items)).index_copy(0, last, losses), is_predicted & (target > 0)
        )

    def _code_vectors(self, items: Tensor) -> Tensor:
        """Returns the embeddings of the codes of items, rows of the item table, [n, levels, E]."""
        return self.embed_codes.each(self.codes[items])

    def _states(self, batch: Batch) -> Tensor:
        """Returns the states that the decoder reads, one per event, [U, E]."""
        tokens = self._tokens(batch.ids[self.history].values())
        embeddings = self.embed(batch) | {self.history: tokens}
        return self.mix(self.preprocess(embeddings, batch).sequence).history()


def _writer(
    config: pb.CodeGenerator,
    sizes: tuple[int, ...],
    embed: CodeEmbedding,
    width: int,
    codes: np.ndarray,
    is_listed: np.ndarray | None,
) -> ParallelItems | SequentialItems:
    if config.HasField("parallel"):
        return ParallelItems(config.parallel, sizes, embed, width, codes)
    has_memory = config.HasField("encoder")
    return SequentialItems(
        config.decoder, sizes, embed, width, codes, is_listed=is_listed, has_memory=has_memory
    )


def _seen(batch: Batch) -> SeenItems:
    return SeenItems(rows_of(batch.seen_layout.lengths, batch.seen.shape[0]), batch.seen - 1)


class CodeLoss(nn.Module):
    """The objective of a generator: the weighted sum of the losses of all positions with a target.

    Args:
        weight_column: column with weights of events or rows; empty for none.
    """

    def __init__(self, weight_column: str):
        super().__init__()
        self.weight_column = weight_column

    def forward(self, outputs: CodeGeneratorOutputs, batch: Batch) -> Losses:
        """Sums the losses of this rank."""
        weights = position_weights(batch, self.weight_column) * outputs.has_target
        return Losses(("next_item",), (outputs.losses * weights).sum()[None], weights.sum()[None], (1.0,))
