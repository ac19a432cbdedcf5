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
from recsys.modules.flops import linear_flops
from recsys.modules.losses import RankingLoss


@dataclass(frozen=True, eq=False)
class RankerOutputs:
    """What the model says about N candidates.

    Attributes:
        logits: float32 [N, L], those of each task side by side, as many as its loss wants.
        predictions: by task, float32 [N]: a probability, or a value in the label's unit.
    """

    logits: Tensor
    predictions: dict[str, Tensor]

    def scores(self) -> Tensor:
        """Returns the predictions as float32 [N, tasks], in the config's order of tasks."""
        return torch.stack(list(self.predictions.values()), dim=1)

    @staticmethod
    def joined(parts: "Sequence[RankerOutputs]") -> "RankerOutputs":
        """Joins the outputs of consecutive candidates."""
        predictions = [part.predictions for part in parts]
        return RankerOutputs(
            torch.cat([part.logits for part in parts]),
            {name: torch.cat([by_task[name] for by_task in predictions]) for name in predictions[0]},
        )


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
        return self(batch).scores()

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
