"""`CodeGenerator`: writes the codes of the next item, and so gives every item of the catalogue a probability.

The token of an item is the sum of the embeddings of its codes, so a history of n items is n tokens for any
mixer. From the mixer's state at every position, a small causal decoder predicts the codes of the next item.
No token may know later events: `models.retriever_declaration` rejects masks, positions and times that would
reveal them.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from recsys import protos as pb
from recsys.config import checks, features
from recsys.config.registry import pick, register
from recsys.data.batch import Batch
from recsys.data.codes import codes_of_table
from recsys.models.base import Losses
from recsys.models.next_item import NextItemModel, last_of_each, position_weights
from recsys.models.ranking import rank_targets
from recsys.models.retriever import MAX_SCORES
from recsys.modules.code_decoder import CodeDecoder, CodeEmbedding
from recsys.modules.code_trie import CodeTrie
from recsys.modules.sequence import following

MAX_NODE_NUMBERS = 2**25
"""Numbers of the widest level that evaluation holds in memory at once: 128 MiB of float32."""


@dataclass(frozen=True, eq=False)
class CodeGeneratorOutputs:
    """The decoder's states and losses at the positions of all histories.

    Attributes:
        states: float32 [U, E], what the decoder reads at each event.
        losses: float32 [U], the loss of predicting the codes of the item after each event.
        has_target: bool [U], whether a known item follows in the same row.
    """

    states: Tensor
    losses: Tensor
    has_target: Tensor


@register(pb.CodeGenerator)
class CodeGenerator(NextItemModel):
    """Embeds codes, preprocesses and mixes, then writes codes.

    Args:
        config: the model's message, which chooses its parts.
        pipeline: the whole resolved config.

    Raises:
        ValueError: lists every finding of `checks.family_findings`.
        DataError: the bundle is damaged, or has no codes for an item of the vocabulary.
    """

    codes: Tensor

    def __init__(self, config: pb.CodeGenerator, *, pipeline: pb.Pipeline):
        if findings := checks.family_findings(pipeline):
            raise ValueError("\n".join(checks.lines(findings, {})))
        super().__init__(pipeline)
        width = pipeline.model.embedding_dim
        codes, sizes = codes_of_table(pipeline, Path(config.bundle))
        # Row 0 stands for unknown items.
        unknown = np.full((1, len(sizes)), -1)
        self.register_buffer("codes", torch.from_numpy(np.concatenate([unknown, codes])))
        self.trie = CodeTrie(codes, sizes)
        self.history = features.PREFIX[pb.HISTORY] + config.item_feature
        self.candidates = features.PREFIX[pb.CANDIDATE] + config.item_feature
        preprocessor, mixer = pick(config.preprocessor), pick(config.mixer)
        self.embed_codes = CodeEmbedding(sizes, width, pipeline.model.embedding.init_std)
        self.preprocess = preprocessor.cls(preprocessor.config, pipeline=pipeline)
        self.mix = mixer.cls(mixer.config, embedding_dim=width)
        self.decode = CodeDecoder(config.decoder, sizes, self.embed_codes, width)
        self.objective = CodeLoss(config.weight_column)
        self.metric_choices = list(config.metrics)
        self.leaves_out_repeated = config.repeated_targets == pb.Retriever.LEAVE_OUT

    def forward(self, batch: Batch) -> CodeGeneratorOutputs:
        """Returns the states of all events, and the losses of the codes after them."""
        items = batch.ids[self.history].values()
        target = following(items, batch.uih_lengths, last=torch.zeros_like(batch.uih_lengths))
        with self.autocast():
            states = self._states(batch)
            losses = self.decode(states, self.codes[target].clamp(min=0))
        return CodeGeneratorOutputs(states.float(), losses, target > 0)

    def score(self, batch: Batch) -> Tensor:
        """Returns the log-probability of each item for each row, float32 [B, V], in the order of the table.

        For a row without history, the decoder starts from a state of zeros.
        """
        with self.autocast():
            states = last_of_each(self._states(batch), batch.uih_lengths)
            return self.decode.scores(states, self.trie)

    def item_vectors(self, batch: Batch) -> Tensor:
        """Returns the codes of all items, float32 [V, levels], which a package keeps with the ids."""
        return self.codes[1:].float()

    def flops(self, batch: Batch) -> int:
        """Counts the FLOP of preprocessor, mixer, and the decoder at every event."""
        events = batch.uih_timestamps.shape[0]
        return self.preprocess.flops(batch) + self.mix.flops(batch.layout) + self.decode.flops(events)

    def ranks(self, outputs: CodeGeneratorOutputs, batch: Batch) -> Tensor:
        """Returns the rank of each candidate in the catalogue by `score`, like `Retriever.ranks`."""
        states = last_of_each(outputs.states, batch.uih_lengths)
        widest = len(self.trie.item) * max(*self.trie.sizes, states.shape[1])
        with self.autocast():
            parts = states.split(max(1, MAX_NODE_NUMBERS // widest))
            scores = torch.cat([self.decode.scores(part, self.trie) for part in parts])
        return rank_targets(
            scores,
            None,
            targets=batch.ids[self.candidates].values(),
            num_targets=batch.num_candidates,
            removed=batch.seen,
            removed_layout=batch.seen_layout,
            missed=batch.repeated,
            max_scores=MAX_SCORES,
        )

    def _states(self, batch: Batch) -> Tensor:
        """Returns the states that the decoder reads, one per event, [U, E]."""
        tokens = self.embed_codes(self.codes[batch.ids[self.history].values()])
        embeddings = self.embed(batch) | {self.history: tokens}
        return self.mix(self.preprocess(embeddings, batch).sequence).history()


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
