"""`Retriever`: the next item of a history, out of the whole catalogue.

Every position of a history is a query for the item behind it, so one row trains as many predictions as it
has events. For that no token may know what comes later: `checks.retriever` refuses masks, positions and times
that would tell it.

With an item encoder it is a two-tower model: the user tower is the history up to its last position, the item
tower the encoder. Without one an item is its embedding.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric

from recsys import protos as pb
from recsys.config import checks, features
from recsys.config.registry import pick, register
from recsys.data.batch import Batch
from recsys.models.base import Losses, MetricRows, Model, build_postprocessor
from recsys.models.columns import without_catalogue
from recsys.models.item_tower import Items, ItemTower
from recsys.models.ranking import rank_targets
from recsys.modules.flops import linear_flops
from recsys.modules.item_encoder import ItemEncoder
from recsys.modules.losses.base import widen
from recsys.modules.losses.softmax import IGNORED
from recsys.modules.preprocessors.preprocessed import inputs_of
from recsys.modules.sequence import JaggedSequence, following
from recsys.ops import gather_rows
from recsys.ops.linear_logp.recompute import SHORTEST

MAX_SCORES = 2**24
"""Scores (targets x items) that evaluation holds at once: 64 MiB of float32."""


@dataclass(frozen=True, eq=False)
class RetrieverOutputs:
    """Vectors to compare, float32. While the model trains they are bfloat16 where its precision is that, and
    as they come: its objective compares them as of unit length where the config says so; else they have it.

    Attributes:
        queries: [U, E], what each event of each history expects next.
        items: [V, E], the batch's negatives: drawn ones, or the whole catalogue.
        batch_items: [D, E], the distinct items of the histories, when negatives are drawn; else none.
    """

    queries: Tensor
    items: Tensor
    batch_items: Tensor


class SharedVectors(NamedTuple):
    """Items that all rows of a batch share: [V, E] negatives and [D, E] those of its histories."""

    items: Tensor
    batch_items: Tensor


@register(pb.Retriever)
class Retriever(Model):
    """Embed, preprocess, mix, compare.

    Args:
        config: its parts.
        pipeline: resolved.

    Raises:
        ValueError: every finding of `checks.family_findings`.
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
            trains_in=torch.bfloat16 if self.precision == pb.BF16 else None,
        )
        self.objective = NextItemLoss(
            config.loss,
            self.history,
            num_items=features.table_rows(features.searched_item(pipeline)) - 1,
            l2_normalize=config.l2_normalize,
        )
        self.metric_choices = list(config.metrics)

    def forward(self, batch: Batch) -> RetrieverOutputs:
        """A query for every event, and the vectors of the batch's negatives."""
        with self.autocast():
            embeddings = self.embed(batch)
            prepared = self.preprocess(embeddings, batch)
            mixed = self.mix(prepared.sequence)
            return self.compare(mixed, embeddings, batch)

    def forward_again(self, batch: Batch, before: RetrieverOutputs) -> RetrieverOutputs:
        """As `forward`, of a batch whose negatives are the same: they are not looked up again."""
        return replace(self(without_catalogue(batch, self.pipeline)), items=before.items)

    def query(self, batch: Batch) -> Tensor:
        """float32 [B, E], what each row expects next; zeros for a row without history."""
        with self.autocast():
            prepared = self.preprocess(self.embed(batch), batch)
            queries = self.compare.queries(self.mix(prepared.sequence))
        return last_of_each(queries, batch.uih_lengths)

    def item_vectors(self, batch: Batch | Items) -> Tensor:
        """float32 [V, E] of the batch's negatives; of the whole catalogue row k is row k + 1 of the table."""
        with self.autocast():
            return self.compare.shared(self.embed(batch), batch).items

    def item_tower(self) -> ItemTower | None:
        """The item encoder as a graph; None where an item is its embedding."""
        return None if self.compare.encode is None else ItemTower(self)

    def score(self, batch: Batch) -> Tensor:
        """`query`: an exported retriever answers with vectors, and a search finds the items."""
        return self.query(batch)

    def flops(self, batch: Batch) -> int:
        """Preprocessor, mixer, postprocessor, and the score of each event's query with each negative."""
        events = batch.uih_timestamps.shape[0]
        sizes = dict(zip(batch.ids.keys(), batch.ids.length_per_key(), strict=True))
        shared = sum(sizes[name] for name in self.compare.shared_columns)
        compared = shared if self.objective.in_batch else sizes[features.NEGATIVES]
        queries = linear_flops(self.compare.postprocess, events) + 2 * events * compared * self.width
        if self.compare.encode is not None:
            queries += self.compare.encode.flops(shared)
        return self.preprocess.flops(batch) + self.mix.flops(batch.layout) + queries

    def metrics(self) -> dict[str, Metric]:
        """`<metric>` -> metric."""
        chosen = [pick(choice) for choice in self.metric_choices]
        built = [metric.cls(metric.config) for metric in chosen]
        return {metric.name: metric for metric in built}

    def metric_rows(self, outputs: RetrieverOutputs, batch: Batch) -> MetricRows:
        """Rank and weight of every candidate of the batch, whose negatives are the whole catalogue."""
        ranks = self.ranks(outputs, batch)
        weights = torch.repeat_interleave(
            batch.sample_weight, batch.num_candidates, output_size=ranks.shape[0]
        )
        return {"": (ranks, weights)}

    def ranks(self, outputs: RetrieverOutputs, batch: Batch) -> Tensor:
        """int64 [N], 1 for the best: the place of each candidate among all items that its row has not seen.

        Ties count against the model. An unknown candidate cannot be found: its rank is V + 1.
        """
        return rank_targets(
            last_of_each(outputs.queries, batch.uih_lengths),
            outputs.items,
            targets=batch.ids[self.candidates].values(),
            num_targets=batch.num_candidates,
            seen=batch.ids[self.history].values(),
            seen_layout=batch.layout.history_only().layout,
            max_scores=MAX_SCORES,
        )


class ComparableVectors(nn.Module):
    """Queries and items in one space, in float32 but while the model trains.

    Args:
        postprocess: applied to queries.
        encode: the item tower; None leaves an item its embedding.
        shared_columns: `features.shared_columns`.
        l2_normalize: make all of unit length, but while the model trains: then the objective does it.
        trains_in: type while the model trains; None leaves it float32. The objective's scores are sums in
            float32, of products of vectors that are rounded to this.
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

    def forward(self, mixed: JaggedSequence, embeddings: dict[str, Tensor], batch: Batch) -> RetrieverOutputs:
        """From mixed tokens and looked-up columns."""
        return RetrieverOutputs(self.queries(mixed), *self.shared(embeddings, batch))

    def queries(self, mixed: JaggedSequence) -> Tensor:
        """[U, E], one an event."""
        return self._comparable(self.postprocess(mixed.history(), mixed.history_times()))

    def shared(self, embeddings: dict[str, Tensor], batch: Batch | Items) -> SharedVectors:
        """Of the items that are named once for all rows."""
        vectors = torch.cat([embeddings[name] for name in self.shared_columns])
        if self.encode is not None:
            vectors = self.encode(vectors, inputs_of(embeddings, batch))
        vectors = self._comparable(vectors)
        negatives = embeddings[features.NEGATIVES].shape[0]
        return SharedVectors(vectors[:negatives], vectors[negatives:])

    def _comparable(self, vectors: Tensor) -> Tensor:
        """[n, E] of any float type -> [n, E], at least float32 unless the model trains in less."""
        if self.training and self.trains_in is not None:
            return vectors.to(self.trains_in)
        vectors = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
        if self.training or not self.l2_normalize:
            return vectors
        return F.normalize(vectors, dim=1, eps=SHORTEST)


class NextItemLoss(nn.Module):
    """The objective of a retriever: each position's loss against the item behind it, in the same row.

    The last position of a row and those before an unknown item have no target. Where the batch's negatives
    are the whole catalogue, as in evaluation, it is the full softmax, whatever training draws.

    Args:
        config: the softmax.
        history: column of the histories' items.
        num_items: of the catalogue.
        l2_normalize: compare vectors as of unit length.
    """

    name = "next_item"

    def __init__(self, config: pb.Loss, history: str, *, num_items: int, l2_normalize: bool):
        super().__init__()
        loss = pick(config)
        self.loss = loss.cls(loss.config)
        self.history = history
        self.num_items = num_items
        self.l2_normalize = l2_normalize
        self.in_batch = config.softmax.HasField("in_batch")

    def forward(self, outputs: RetrieverOutputs, batch: Batch) -> Losses:
        """Sums and counts over the positions of this rank that have a target."""
        items = batch.ids[self.history].values()
        nothing = torch.zeros_like(batch.uih_lengths)
        target = following(items, batch.uih_lengths, last=nothing)
        has_target = target > 0
        if len(outputs.items) == self.num_items and not len(outputs.batch_items):
            # The catalogue is the table without row 0, which stands for unknown items.
            rows = torch.where(has_target, target - 1, IGNORED)
            found = self.loss(outputs.queries, outputs.items, rows, l2_normalize=self.l2_normalize)
        else:
            found = self._sampled(outputs, batch, torch.where(has_target, target, IGNORED))
        count = items.shape[0]
        weights = torch.repeat_interleave(batch.sample_weight, batch.uih_lengths, output_size=count)
        weights = weights * has_target
        return Losses((self.name,), (found * weights).sum()[None], weights.sum()[None], (1.0,))

    def _sampled(self, outputs: RetrieverOutputs, batch: Batch, target: Tensor) -> Tensor:
        """[U], against the batch's negatives; every target is among the batch's items."""
        known = batch.ids[features.BATCH_ITEMS].values()
        negatives, ids = outputs.items, batch.ids[features.NEGATIVES].values()
        # Behind the items stands what a position without a target is compared with, which no one looks at.
        others = torch.cat([outputs.batch_items, outputs.batch_items.new_zeros(1, negatives.shape[1])])
        others = widen(others)  # an item's gradients are summed over all that look for it
        positives = others[torch.searchsorted(known, target)]
        if self.in_batch:
            negatives, ids = torch.cat([negatives, outputs.batch_items]), torch.cat([ids, known])
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


def last_of_each(values: Tensor, lengths: Tensor) -> Tensor:
    """[n, E] of B lists -> [B, E], the last entry of each; zeros for an empty list."""
    return gather_rows(values, torch.where(lengths > 0, lengths.cumsum(0) - 1, -1))
