"""`Retriever`: finds the next item of a history in the whole catalogue.

Every position of a history is a query for the item after it, so a row trains as many predictions as it has
events. No token may know later events: `models.retriever_declaration` rejects masks, positions and times that
would reveal them.

With an item encoder this is a two-tower model: the user tower encodes the history up to its last position,
and the item encoder is the item tower. Without an encoder, the vector of an item is its embedding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recsys import protos as pb
from recsys.config import checks, features
from recsys.config.registry import pick, register
from recsys.data.batch import Batch
from recsys.models.base import Losses, build_postprocessor
from recsys.models.columns import without_catalogue
from recsys.models.item_tower import Items, ItemTower
from recsys.models.next_item import NextItemModel, last_of_each, position_weights
from recsys.models.ranking import rank_targets
from recsys.modules.flops import linear_flops
from recsys.modules.item_encoder import ItemEncoder
from recsys.modules.losses.base import widen
from recsys.modules.losses.divided_softmax import CataloguePart
from recsys.modules.losses.softmax import IGNORED
from recsys.modules.precision import COMPUTE_DTYPES
from recsys.modules.sequence import JaggedSequence, following
from recsys.ops.linear_logp.recompute import SHORTEST

MAX_SCORES = 2**24
"""Number of scores (targets x items) that evaluation holds in memory at once: 64 MiB of float32."""


@dataclass(frozen=True, eq=False)
class RetrieverOutputs:
    """The vectors that a retriever compares.

    In training they have the model's precision, float32, bfloat16 or float16, and are not yet normalized: the
    objective does that if the config sets `l2_normalize`. In evaluation they are float32 and, with
    `l2_normalize`, have unit length.

    Attributes:
        queries: [U, E], for each event of each history, the query for the item after it.
        items: [V, E], the batch's negatives: drawn items, the whole catalogue, or this rank's part of it.
        batch_items: [D, E], the distinct items of the histories if negatives are drawn; else empty.
    """

    queries: Tensor
    items: Tensor
    batch_items: Tensor


class SharedVectors(NamedTuple):
    """Vectors of items that all rows of a batch share: negatives [V, E], items of its histories [D, E]."""

    items: Tensor
    batch_items: Tensor


@register(pb.Retriever)
class Retriever(NextItemModel):
    """Embeds, preprocesses and mixes, then maps queries and items into one space.

    Args:
        config: the model's message, which chooses its parts.
        pipeline: the whole resolved config.

    Raises:
        ValueError: lists every finding of `checks.family_findings`.
    """

    def __init__(self, config: pb.Retriever, *, pipeline: pb.Pipeline):
        if findings := checks.family_findings(pipeline):
            raise ValueError("\n".join(checks.lines(findings, {})))
        super().__init__(pipeline)
        self.width = width = pipeline.model.embedding_dim
        preprocessor, mixer = pick(config.preprocessor), pick(config.mixer)
        self.history = features.PREFIX[pb.HISTORY] + config.item_feature
        self.candidates = features.PREFIX[pb.CANDIDATE] + config.item_feature
        self.preprocess = preprocessor.cls(preprocessor.config, pipeline=pipeline)
        self.mix = mixer.cls(mixer.config, embedding_dim=width)
        self.compare = ComparableVectors(
            build_postprocessor(config, width),
            ItemEncoder(config.item_encoder, pipeline=pipeline) if config.HasField("item_encoder") else None,
            features.shared_columns(pipeline),
            l2_normalize=config.l2_normalize,
            trains_in=None if self.precision == pb.FP32 else COMPUTE_DTYPES[self.precision],
        )
        self.objective = NextItemLoss(
            config.loss,
            self.history,
            num_items=features.table_rows(features.searched_item(pipeline)) - 1,
            l2_normalize=config.l2_normalize,
            weight_column=config.weight_column,
        )
        self.metric_choices = list(config.metrics)
        self.leaves_out_repeated = config.repeated_targets == pb.Retriever.LEAVE_OUT

    def forward(self, batch: Batch) -> RetrieverOutputs:
        """Returns a query for every event, and the vectors of the batch's negatives."""
        with self.autocast():
            inputs = self.embed(batch)
            prepared = self.preprocess(inputs, batch)
            mixed = self.mix(prepared.sequence)
            return self.compare(mixed, inputs)

    def forward_again(self, batch: Batch, before: RetrieverOutputs) -> RetrieverOutputs:
        """Computes `forward` for a batch with the same negatives as before, which are not encoded again."""
        return replace(self(without_catalogue(batch, self.pipeline)), items=before.items)

    def query(self, batch: Batch) -> Tensor:
        """Returns the query for each row's next item, float32 [B, E]; zeros for a row without history."""
        with self.autocast():
            prepared = self.preprocess(self.embed(batch), batch)
            queries = self.compare.queries(self.mix(prepared.sequence))
        return last_of_each(queries, batch.uih_lengths)

    def item_vectors(self, batch: Batch | Items) -> Tensor:
        """Returns the vectors of the batch's negatives, float32 [V, E].

        If the negatives are the whole catalogue, vector k belongs to row k + 1 of the item table.
        """
        with self.autocast():
            return self.compare.shared(self.embed(batch)).items

    def divide_catalogue(self, rank: int, world_size: int) -> None:
        """Makes the loss compare the queries of all ranks with the items of each."""
        count = self.objective.num_items
        rows = features.catalogue_rows(count + 1, rank, world_size)
        self.objective.part = CataloguePart(rows.start - 1, count, rank, world_size)

    def item_tower(self) -> ItemTower | None:
        """Returns the item encoder as a graph; None if the vector of an item is its embedding."""
        return None if self.compare.encode is None else ItemTower(self)

    def score(self, batch: Batch) -> Tensor:
        """Returns `query`, since an exported retriever answers with vectors and a search finds the items."""
        return self.query(batch)

    def flops(self, batch: Batch) -> int:
        """Counts the FLOP of preprocessor, mixer, postprocessor and encoder, and of all scores."""
        events = batch.uih_timestamps.shape[0]
        sizes = dict(zip(batch.ids.keys(), batch.ids.length_per_key(), strict=True))
        shared = sum(sizes[name] for name in self.compare.shared_columns)
        compared = shared if self.objective.in_batch else sizes[features.NEGATIVES]
        if self.training and self.objective.part is not None:
            compared = self.objective.num_items
        queries = linear_flops(self.compare.postprocess, events) + 2 * events * compared * self.width
        if self.compare.encode is not None:
            queries += self.compare.encode.flops(shared)
        return self.preprocess.flops(batch) + self.mix.flops(batch.layout) + queries

    def ranks(self, outputs: RetrieverOutputs, batch: Batch) -> Tensor:
        """Returns the rank of each candidate in the catalogue, int64 [N]; 1 is the best.

        Ties count against the model. Seen items of a row (`batch.seen`) are removed for it. A removed or
        unknown candidate cannot be found, so its rank is V + 1.
        """
        queries = last_of_each(outputs.queries, batch.uih_lengths)
        return self.answer_ranks((queries,), outputs.items, batch)

    def answer_ranks(self, answer: Sequence[Tensor], items: Tensor | None, batch: Batch) -> Tensor:
        """Returns `ranks` for a query for each row, [B, E], and the vectors of all items, [V, E]."""
        (queries,) = answer
        return rank_targets(
            queries,
            items,
            targets=batch.ids[self.candidates].values(),
            num_targets=batch.num_candidates,
            removed=batch.seen,
            removed_layout=batch.seen_layout,
            missed=batch.repeated,
            max_scores=MAX_SCORES,
        )


class ComparableVectors(nn.Module):
    """Maps queries and items into one space, in at least float32 outside training.

    Args:
        postprocess: the postprocessor of queries.
        encode: the item tower; None if the vector of an item is its embedding.
        shared_columns: the columns of `features.shared_columns`.
        l2_normalize: whether to scale vectors to unit length; in training the objective does it instead.
        trains_in: dtype of vectors in training; None keeps float32. The objective's scores are float32 sums
            of products in this dtype.
    """

    def __init__(
        self,
        postprocess: nn.Module,
        encode: ItemEncoder | None,
        shared_columns: list[str],
        *,
        l2_normalize: bool,
        trains_in: torch.dtype | None,
    ):
        super().__init__()
        self.postprocess = postprocess
        self.encode = encode
        self.shared_columns = shared_columns
        self.l2_normalize = l2_normalize
        self.trains_in = trains_in

    def forward(self, mixed: JaggedSequence, inputs: dict[str, Tensor]) -> RetrieverOutputs:
        """Computes queries from mixed tokens, and items from looked-up columns."""
        return RetrieverOutputs(self.queries(mixed), *self.shared(inputs))

    def queries(self, mixed: JaggedSequence) -> Tensor:
        """Returns one query per event, [U, E]."""
        return self._comparable(self.postprocess(mixed.history(), mixed.history_times()))

    def shared(self, inputs: dict[str, Tensor]) -> SharedVectors:
        """Returns the vectors of the items that all rows of a batch share."""
        vectors = torch.cat([inputs[name] for name in self.shared_columns])
        if self.encode is not None:
            vectors = self.encode(vectors, inputs)
        vectors = self._comparable(vectors)
        negatives = inputs[features.NEGATIVES].shape[0]
        return SharedVectors(vectors[:negatives], vectors[negatives:])

    def _comparable(self, vectors: Tensor) -> Tensor:
        """Casts [n, E] to `trains_in` in training; otherwise to at least float32, normalized if required."""
        if self.training and self.trains_in is not None:
            return vectors.to(self.trains_in)
        vectors = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
        if self.training or not self.l2_normalize:
            return vectors
        return F.normalize(vectors, dim=1, eps=SHORTEST)


class NextItemLoss(nn.Module):
    """The objective of a retriever: the loss of each position with the next item of its row as the target.

    The last position of a row, and a position before an unknown item, have no target. If the batch's
    negatives are the whole catalogue, as in evaluation, the loss is the full softmax.

    Args:
        config: the message of the softmax.
        history: name of the column with the items of histories.
        num_items: number of items in the catalogue.
        l2_normalize: whether to compare vectors as if they had unit length.
        weight_column: name of the column with the weight of each row, or of the prediction of each event; ""
            for none.

    Attributes:
        part: this rank's part of the catalogue, if ranks divide it in training; else None.
    """

    name = "next_item"

    def __init__(
        self, config: pb.Loss, history: str, *, num_items: int, l2_normalize: bool, weight_column: str
    ):
        super().__init__()
        loss = pick(config)
        self.loss = loss.cls(loss.config)
        self.history = history
        self.num_items = num_items
        self.l2_normalize = l2_normalize
        self.weight_column = weight_column
        self.in_batch = config.softmax.HasField("in_batch")
        self.part: CataloguePart | None = None

    def forward(self, outputs: RetrieverOutputs, batch: Batch) -> Losses:
        """Returns sums and counts over the positions of this rank that have a target."""
        items = batch.ids[self.history].values()
        nothing = torch.zeros_like(batch.uih_lengths)
        target = following(items, batch.uih_lengths, last=nothing)
        has_target = target > 0
        part = self.part if self.training else None
        if part is not None or (len(outputs.items) == self.num_items and not len(outputs.batch_items)):
            # The catalogue is the table without row 0, which represents unknown items.
            rows = torch.where(has_target, target - 1, IGNORED)
            losses = self.loss(
                outputs.queries, outputs.items, rows, l2_normalize=self.l2_normalize, part=part
            )
        else:
            losses = self._sampled(outputs, batch, torch.where(has_target, target, IGNORED))
        weights = position_weights(batch, self.weight_column) * has_target
        return Losses((self.name,), (losses * weights).sum()[None], weights.sum()[None], (1.0,))

    def _sampled(self, outputs: RetrieverOutputs, batch: Batch, target: Tensor) -> Tensor:
        """Returns losses [U] against the batch's negatives. Every target is among the batch's items."""
        batch_ids = batch.ids[features.BATCH_ITEMS].values()
        negatives, ids = outputs.items, batch.ids[features.NEGATIVES].values()
        # Positions without a target use a row of zeros after the items; their loss is dropped.
        candidates = torch.cat([outputs.batch_items, outputs.batch_items.new_zeros(1, negatives.shape[1])])
        candidates = widen(candidates)  # so that an item's gradients from all positions are summed in float32
        positives = candidates[torch.searchsorted(batch_ids, target)]
        if self.in_batch:
            negatives, ids = torch.cat([negatives, outputs.batch_items]), torch.cat([ids, batch_ids])
        log_weights = batch.numbers.get(features.LOG_WEIGHTS)
        return self.loss(
            outputs.queries,
            negatives,
            target,
            positives=positives,
            item_ids=ids,
            log_weights=log_weights,
            l2_normalize=self.l2_normalize,
        )
