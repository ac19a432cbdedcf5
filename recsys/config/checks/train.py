"""Checks the rules of the training run and of its device."""

import importlib.util
from collections.abc import Iterator

from recsys import protos as pb
from recsys.config import fields
from recsys.config.checks.model import metric_names
from recsys.config.checks.walk import Finding
from recsys.config.textproto import did_you_mean

_CUDA_ONLY = ("adam", "partial_row_wise_adam")
"""Sparse optimizers that FBGEMM has only on CUDA."""


def device(pipeline: pb.Pipeline, kind: str) -> Iterator[Finding]:
    """Yields findings about settings that a device, `cpu` or `cuda`, does not support."""
    for name in _CUDA_ONLY:
        if kind == "cpu" and sharded(pipeline) and pipeline.train.sparse_optimizer.HasField(name):
            problem = "FBGEMM has it on CUDA only; on a CPU use row_wise_adagrad"
            yield Finding(f"train.sparse_optimizer.{name}", problem)


LIBRARIES = {"wandb": "wandb", "mlflow": "mlflow"}
"""Module that each hook imports, by field of `pb.Hook`; the extra that installs it has the field's name."""


def libraries(pipeline: pb.Pipeline) -> Iterator[Finding]:
    """Yields findings about hooks whose library is not installed. Only training needs these libraries."""
    for index, hook in enumerate(pipeline.train.hooks):
        field = fields.chosen(hook)
        if field is not None and field.name in LIBRARIES and not is_installed(LIBRARIES[field.name]):
            problem = f"python -m pip install 'generative-recsys[{field.name}]'"
            yield Finding(
                f"train.hooks[{index}].{field.name}", f"the library is not installed; type: {problem}"
            )


def is_installed(module: str) -> bool:
    """Returns whether a library can be imported.

    A plain folder of that name on the path, such as the folder `wandb` that runs leave behind, does not
    count.
    """
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None


def sharded(pipeline: pb.Pipeline) -> bool:
    """Returns whether the sparse optimizer trains the embedding tables."""
    return pipeline.model.embedding.placement == pb.Embedding.SHARDED


def _evaluation(pipeline: pb.Pipeline) -> Iterator[Finding]:
    evaluation, path = pipeline.train.evaluation, "train.evaluation"
    if evaluation.HasField("best_metric"):
        metrics = {metric.name: metric for metric in metric_names(pipeline)}
        name = evaluation.best_metric
        if name not in metrics:
            yield Finding(
                f"{path}.best_metric", f"the model has no metric {name!r}. {did_you_mean(name, metrics)}"
            )
        elif not metrics[name].directed:
            problem = f"{name} is best at 1, neither high nor low; choose another metric"
            yield Finding(f"{path}.best_metric", problem)
    if not pipeline.data.HasField("validation"):
        for field in ("every_steps", "patience", "max_batches"):
            if evaluation.HasField(field):
                yield Finding(f"{path}.{field}", "there is nothing to evaluate on; set data.validation")
    if evaluation.HasField("patience") and not evaluation.HasField("best_metric"):
        yield Finding(f"{path}.patience", "no metric says what an improvement is; give the model a metric")


def _nesterov(pipeline: pb.Pipeline) -> Iterator[Finding]:
    sgd = pipeline.train.dense_optimizer.sgd
    if sgd.nesterov and sgd.momentum == 0:
        yield Finding(
            "train.dense_optimizer.sgd.nesterov", "it looks ahead along the momentum; set momentum too"
        )


RULES = (_evaluation, _nesterov)
