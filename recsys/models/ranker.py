"""`Ranker` (DLRM-HSTU): one score a candidate and task, all candidates of a row in one pass.

Contextual tokens, history and candidates form one sequence; the mixer lets each candidate read the history,
and the head compares what it became with what it was. Source: arXiv 2402.17152.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from recsys import protos as pb
from recsys.config.registry import pick, register
from recsys.data.batch import Batch
from recsys.models.base import Losses, MetricRows, Model, build_postprocessor, layout_rule
from recsys.models.cached import RankerCache, microbatches
from recsys.models.halves import Halves
from recsys.modules.cache import CachingMixer, MixerCache
from recsys.modules.flops import linear_flops
from recsys.modules.losses import RankingLoss
from recsys.modules.preprocessors import Preprocessed
from recsys.modules.sequence import JaggedSequence


@dataclass(frozen=True, eq=False)
class RankerOutputs:
    """What the model says about N candidates.

    Attributes:
        logits: float32 [N, L], those of each task side by side, as many as its loss wants.
        predictions: by task, float32 [N]: a probability, or a value in the label's unit.
    """

    logits: Tensor
    predictions: dict[str, Tensor]


@register(pb.Ranker)
class Ranker(Model):
    """Embed, preprocess, mix, take targets, heads.

    Args:
        config: its parts.
        pipeline: resolved.

    Raises:
        ValueError: no task, or a preprocessor that makes no target tokens.
    """

    def __init__(self, config: pb.Ranker, *, pipeline: pb.Pipeline):
        super().__init__(pipeline)
        width = pipeline.model.embedding_dim
        if not config.tasks:
            raise ValueError("model.ranker.tasks: none is given; name at least one task to predict")
        preprocessor = pick(config.preprocessor)
        if not layout_rule(pipeline).targets:
            name = type(preprocessor.config).DESCRIPTOR.name
            raise ValueError(
                f"model.ranker.preprocessor: {name} makes no tokens of candidates; choose `contextual`"
            )
        self.preprocess = preprocessor.cls(preprocessor.config, pipeline=pipeline)
        mixer = pick(config.mixer)
        self.mix = mixer.cls(mixer.config, embedding_dim=width)
        self.postprocess = build_postprocessor(config, width)
        self.tasks = list(config.tasks)
        self.objective = TaskLosses(self.tasks)
        head = pick(config.head)
        num_outputs = [loss.num_logits for loss in self.objective.losses]
        self.head = head.cls(head.config, embedding_dim=width, num_outputs=num_outputs)
        self.halves = Halves(pipeline)
        self.predict = TaskPredictions([task.name for task in self.tasks], self.objective.losses)

    def forward(self, batch: Batch) -> RankerOutputs:
        """Logits and predictions of every candidate of the batch."""
        with self.autocast():
            embeddings = self.embed(batch)
            prepared = self.preprocess(embeddings, batch)
            mixed = self.mix(prepared.sequence)
            targets = self.postprocess(mixed.targets(), mixed.target_times())
            return self.predict(self.head(targets, prepared.candidates))

    def score(self, batch: Batch) -> Tensor:
        """float32 [N, tasks], predictions in the config's order of tasks."""
        return self._stack(self(batch))

    def prefill(self, batch: Batch) -> RankerCache:
        """What candidates look at of each row's user and history; candidates of the batch are left alone.

        For `score_cached`, in evaluation mode under `torch.no_grad()`.

        Raises:
            ValueError: the mixer keeps no cache. RuntimeError: the model is in training.
        """
        mixer = self.caching_mixer()
        with self.autocast():
            users = self.halves.users(batch)
            sequence, prefix = self.preprocess.prefix(self.embed(users), users)
            return RankerCache(prefix, mixer.prefill(sequence))

    def score_cached(self, batch: Batch, cache: RankerCache) -> Tensor:
        """`score` of a batch whose users and histories are in the cache; only candidates are looked at.

        Args:
            batch: row b has the candidates of user b of the cache, any number.

        Raises:
            TypeError, ValueError: another number of rows, dtype or device. RuntimeError: the model is in
                training, or gradients are asked for.
        """
        with self.autocast():
            prepared = self.encode_candidates(batch, cache)
            return self.score_encoded(prepared.sequence, prepared.candidates, cache.mixer)

    def score_in_microbatches(self, batch: Batch, cache: RankerCache, size: int) -> Tensor:
        """`score_cached` with bounded memory: at most `size` candidates of each row at a time.

        Target groups stay whole: `size` is rounded down to some of them, at least one.
        """
        with self.autocast():
            prepared, mixer = self.encode_candidates(batch, cache), cache.mixer
            scores, places, rows = [], [], list(range(cache.batch_size))
            group_size = self.caching_mixer().target_group_size
            for part in microbatches(prepared.sequence.layout, size, group_size):
                if part.rows != rows:
                    number = {row: number for number, row in enumerate(rows)}
                    mixer, rows = mixer.select([number[row] for row in part.rows]), part.rows
                own = prepared.candidates.index_select(0, part.places)
                scores.append(self.score_encoded(prepared.sequence.take(part.targets), own, mixer))
                places.append(part.places)
            if not scores:
                return self.score_encoded(prepared.sequence, prepared.candidates, mixer)
            found = torch.cat(scores)
            return torch.empty_like(found).index_copy_(0, torch.cat(places), found)

    def extend(self, batch: Batch, cache: RankerCache) -> RankerCache:
        """The cache of users who have done more since; the given one stays as it is.

        Equal to `prefill` of the whole histories, with the USER features of before. How many events a row or
        a channel may have is the reader's matter and not asked here.

        Args:
            batch: row b has the new events of user b of the cache, any number, oldest first.

        Raises:
            ValueError: new events would change what is kept of old tokens; naming the setting.
        """
        mixer, batch = self.caching_mixer(), self.halves.events(batch)
        with self.autocast():
            sequence = self.preprocess.events(self.embed(batch), batch, cache.prefix)
            return RankerCache(cache.prefix.append(batch.sequences), mixer.extend(sequence, cache.mixer))

    def encode_candidates(self, batch: Batch, cache: RankerCache) -> Preprocessed:
        """The first half of `score_cached`: target tokens, and candidates for the head. Within `autocast`."""
        batch = self.halves.candidates(batch)
        rows = batch.num_candidates.shape[0]
        if rows != cache.batch_size:
            raise ValueError(f"the batch has {rows} rows, the cache {cache.batch_size}: select rows of it")
        return self.preprocess.candidates(self.embed(batch), batch, cache.prefix)

    def score_encoded(self, sequence: JaggedSequence, candidates: Tensor, cache: MixerCache) -> Tensor:
        """The second half of `score_cached`, of some candidates: [n, tasks]. Within `autocast`."""
        mixed = self.caching_mixer().score(sequence, cache)
        targets = self.postprocess(mixed.values, mixed.next_timestamps)
        return self._stack(self.predict(self.head(targets, candidates)))

    def _stack(self, outputs: RankerOutputs) -> Tensor:
        return torch.stack([outputs.predictions[task.name] for task in self.tasks], dim=1)

    def caching_mixer(self) -> CachingMixer:
        """The mixer.

        Raises:
            ValueError: it keeps no cache.
        """
        if not isinstance(self.mix, CachingMixer):
            name = type(self.mix).__name__
            raise ValueError(f"{name} keeps no cache; score whole rows, or train with HstuMixer")
        return self.mix

    def flops(self, batch: Batch) -> int:
        """Preprocessor, mixer, postprocessor and head."""
        candidates = batch.candidate_timestamps.shape[0]
        heads = linear_flops(self.postprocess, candidates) + linear_flops(self.head, candidates)
        return self.preprocess.flops(batch) + self.mix.flops(batch.sequences) + heads

    def metrics(self) -> dict[str, Metric]:
        """`<task>/<metric>` -> metric."""
        found = {}
        for task in self.tasks:
            for choice in task.metrics:
                chosen = pick(choice)
                metric = chosen.cls(chosen.config)
                found[f"{task.name}/{metric.name}"] = metric
        return found

    def metric_rows(self, outputs: RankerOutputs, batch: Batch) -> MetricRows:
        """Of each task predictions, labels, weights and groups."""
        weights = per_candidate(batch.sample_weight, batch)
        groups = per_candidate(batch.group, batch)
        return {
            task: (predictions, batch.labels[task], weights, groups)
            for task, predictions in outputs.predictions.items()
        }

    @property
    def probabilities(self) -> tuple[str, ...]:
        """Tasks with a binary loss."""
        objective = self.objective
        return tuple(
            name
            for name, loss in zip(objective.names, objective.losses, strict=True)
            if loss.kind == "binary"
        )


class TaskLosses(nn.Module):
    """The objective of a ranker: each task's loss, summed over candidates with their row's weight."""

    def __init__(self, tasks: Sequence[pb.Task]):
        super().__init__()
        self.names = tuple(task.name for task in tasks)
        self.weights = tuple(task.weight for task in tasks)
        chosen = [pick(task.loss) for task in tasks]
        self.losses = nn.ModuleList(loss.cls(loss.config) for loss in chosen)

    def forward(self, outputs: RankerOutputs, batch: Batch) -> Losses:
        """Sums and counts over the candidates of this rank."""
        weights = per_candidate(batch.sample_weight, batch)
        compares = any(loss.compares for loss in self.losses)
        rows = batch.layout.targets_only().layout if compares else None
        sums = [
            (loss(logits, batch.labels[name], rows) * weights).sum()
            for name, loss, logits in zip(
                self.names, self.losses, by_task(outputs.logits, self.losses), strict=True
            )
        ]
        counts = weights.sum().expand(len(sums))
        return Losses(self.names, torch.stack(sums), counts, self.weights)


class TaskPredictions(nn.Module):
    """From the head's logits to what each task's loss says they mean, in float32."""

    def __init__(self, names: Sequence[str], losses: nn.ModuleList):
        super().__init__()
        self.names = tuple(names)
        self.losses = losses

    def forward(self, logits: Tensor) -> RankerOutputs:
        """Logits [N, L] of any float type, task by task."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        predictions = {
            name: loss.predict(own)
            for name, loss, own in zip(self.names, self.losses, by_task(logits, self.losses), strict=True)
        }
        return RankerOutputs(logits, predictions)


def by_task(logits: Tensor, losses: Iterable[RankingLoss]) -> list[Tensor]:
    """[N, L] cut into what each loss takes: [N], or [N, num_logits] where that is more than 1."""
    parts = logits.split([loss.num_logits for loss in losses], dim=1)
    return [part.squeeze(1) if part.shape[1] == 1 else part for part in parts]


def per_candidate(values: Tensor, batch: Batch) -> Tensor:
    """[B] to [N]: each candidate gets its row's value."""
    count = batch.candidate_timestamps.shape[0]
    return torch.repeat_interleave(values, batch.num_candidates, output_size=count)
