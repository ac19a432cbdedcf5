"""`Ranker` (DLRM-HSTU): predicts every task for every candidate of a row in a single pass.

Contextual tokens, history and candidates form one sequence. The mixer lets each candidate read the history,
and the head combines the candidate's mixed token with its content before mixing. Source: arXiv 2402.17152.
"""

from collections.abc import Sequence

from torch import Tensor
from torchmetrics import Metric

from recsys import protos as pb
from recsys.config.registry import pick, register
from recsys.data.batch import Batch
from recsys.models.base import MetricRows, Model, build_postprocessor, layout_rule
from recsys.models.tasks import TaskLosses, TaskOutputs, TaskPredictions, task_metrics, task_rows
from recsys.modules.flops import linear_flops


@register(pb.Ranker)
class Ranker(Model):
    """Embeds, preprocesses and mixes, then applies the head to the targets.

    Args:
        config: the model's message, which chooses its parts.
        pipeline: the whole resolved config.

    Raises:
        ValueError: there is no task, or the preprocessor makes no target tokens.
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

    def forward(self, batch: Batch) -> TaskOutputs:
        """Returns logits and predictions of every candidate of the batch."""
        with self.autocast():
            inputs = self.embed(batch)
            prepared = self.preprocess(inputs, batch)
            mixed = self.mix(prepared.sequence)
            targets = self.postprocess(mixed.targets(), mixed.target_times())
            return self.predict(self.head(targets, prepared.candidates))

    def score(self, batch: Batch) -> Tensor:
        """Returns the predictions as float32 [N, tasks], in the config's order of tasks."""
        return self(batch).scores()

    def flops(self, batch: Batch) -> int:
        """Counts the FLOP of preprocessor, mixer, postprocessor and head."""
        candidates = batch.candidate_timestamps.shape[0]
        heads = linear_flops(self.postprocess, candidates) + linear_flops(self.head, candidates)
        return self.preprocess.flops(batch) + self.mix.flops(batch.sequences) + heads

    def metrics(self) -> dict[str, Metric]:
        """Builds the metrics of all tasks, named `<task>/<metric>`."""
        return task_metrics(self.tasks)

    def metric_rows(self, outputs: TaskOutputs, batch: Batch) -> MetricRows:
        """Returns predictions, labels, weights and groups of the candidates, for each task."""
        return task_rows(outputs, batch, self.tasks)

    def answer_rows(self, answer: Sequence[Tensor], items: Tensor | None, batch: Batch) -> MetricRows:
        """Returns the rows of `metric_rows` for predictions [N, tasks], as `score` returns them."""
        (scores,) = answer
        predictions = dict(zip([task.name for task in self.tasks], scores.unbind(1), strict=True))
        return task_rows(TaskOutputs(scores[:, :0], predictions), batch, self.tasks)

    @property
    def probabilities(self) -> tuple[str, ...]:
        """The names of the tasks with a binary loss."""
        return self.objective.probabilities
