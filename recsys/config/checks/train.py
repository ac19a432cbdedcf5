"""Checks the rules of the training run and of its device."""

import importlib.util
from collections.abc import Iterator

from recsys import protos as pb
from recsys.config import features, fields
from recsys.config.checks.model import metric_names
from recsys.config.checks.walk import Finding
from recsys.config.textproto import did_you_mean

_CUDA_ONLY = ("adam", "partial_row_wise_adam")
"""Sparse optimizers that FBGEMM has only on CUDA."""

ROW_STATES = ("row_wise_adagrad", "partial_row_wise_adam")
"""Sparse optimizers with a state for each row, which COLUMN_WISE would split."""

_NO_BF16 = "BF16 is given; FBGEMM has no tables in bfloat16 on every device; use FP16 or FP32"


def device(pipeline: pb.Pipeline, kind: str) -> Iterator[Finding]:
    """Yields findings about settings that a device, `cpu` or `cuda`, does not support."""
    for name in _CUDA_ONLY:
        if kind == "cpu" and sharded(pipeline) and pipeline.train.sparse_optimizer.HasField(name):
            problem = "FBGEMM has it on CUDA only; on a CPU use row_wise_adagrad"
            yield Finding(f"train.sparse_optimizer.{name}", problem)
    if kind == "cpu" and sharded(pipeline) and pipeline.train.unique_ids:
        yield Finding("train.unique_ids", "it needs a GPU: FBGEMM finds unique ids on CUDA only")
    if kind == "cpu" and sharded(pipeline):
        for place, message in _sharding_messages(pipeline):
            if message.kernel in (pb.TableSharding.FUSED_UVM, pb.TableSharding.FUSED_UVM_CACHING):
                problem = "it needs a GPU; on a CPU all tables are in the host's memory: set FUSED or AUTO"
                yield Finding(
                    f"{place}.kernel", f"{pb.TableSharding.Kernel.Name(message.kernel)} is given; {problem}"
                )


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
    """Returns whether the sparse optimizer trains any of the embedding tables."""
    embedding = pipeline.model.embedding
    placements = [embedding.placement, *(table.placement for table in embedding.tables)]
    return pb.Embedding.SHARDED in placements


def _sharding_messages(pipeline: pb.Pipeline) -> Iterator[tuple[str, pb.Sharding | pb.TableSharding]]:
    """Yields the messages that divide tables over ranks, with their paths."""
    sharding = pipeline.train.sharding
    yield "train.sharding", sharding
    for index, table in enumerate(sharding.tables):
        yield f"train.sharding.tables[{index}]", table


def _tables(pipeline: pb.Pipeline) -> Iterator[Finding]:
    """Settings of single tables must name a table, and each table once."""
    every = features.table_names(pipeline)
    divided = [name for name in every if features.is_sharded(pipeline, name)]
    for path, entries, names in (
        ("model.embedding.tables", pipeline.model.embedding.tables, every),
        ("train.sharding.tables", pipeline.train.sharding.tables, divided),
    ):
        seen: set[str] = set()
        for index, entry in enumerate(entries):
            place, name = f"{path}[{index}].table", entry.table
            if name in seen:
                yield Finding(place, f"{name!r} is given twice; put all settings of a table into one entry")
            elif name in every and name not in names:
                problem = "the table is REPLICATED, so it is not divided"
                yield Finding(place, f"{name!r} is given; {problem}; remove the entry")
            elif name and name not in names:
                yield Finding(place, f"there is no table {name!r}. {did_you_mean(name, names)}")
            seen.add(name)


def _column_wise(pipeline: pb.Pipeline) -> Iterator[Finding]:
    """An accumulator for each row would become one for each part of a row: another optimizer."""
    chosen = fields.chosen(pipeline.train.sparse_optimizer)
    if not sharded(pipeline) or chosen is None or chosen.name not in ROW_STATES:
        return
    for place, message in _sharding_messages(pipeline):
        if message.kind == pb.Sharding.COLUMN_WISE:
            problem = f"{chosen.name} has one state for a row, which column-wise shards would split"
            yield Finding(
                f"{place}.kind", f"COLUMN_WISE is given; {problem}; use ROW_WISE, or sparse_optimizer adagrad"
            )


def _table_precision(pipeline: pb.Pipeline) -> Iterator[Finding]:
    embedding, path = pipeline.model.embedding, "model.embedding"
    halves = {entry.table_precision for entry in embedding.tables} | {embedding.table_precision}
    if pb.FP16 in halves and pipeline.train.HasField("weight_averaging") and sharded(pipeline):
        problem = "an average of FP16 tables would lose small updates"
        yield Finding("train.weight_averaging", f"{problem}; leave it out, or set table_precision: FP32")
    if embedding.table_precision == pb.BF16:
        yield Finding(f"{path}.table_precision", _NO_BF16)
    for index, entry in enumerate(embedding.tables):
        place = f"{path}.tables[{index}].table_precision"
        if entry.table_precision == pb.BF16:
            yield Finding(place, _NO_BF16)
        elif entry.table_precision == pb.FP16 and not features.is_sharded(pipeline, entry.table):
            problem = "train.dense_optimizer trains a REPLICATED table and needs float32"
            yield Finding(place, f"FP16 is given; {problem}; use FP32, or placement SHARDED")


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


def _balance(pipeline: pb.Pipeline) -> Iterator[Finding]:
    """A loss whose negatives are items of the rank's own rows would change if rows moved."""
    if not pipeline.train.balance_ranks or not features.shared_columns(pipeline):
        return
    if features.samples_negatives(pipeline):
        problem = "negatives are sampled from the rows of each rank, so moving rows would change the loss"
        yield Finding("train.balance_ranks", f"{problem}; leave it out, or use a loss over all items")


RULES = (_evaluation, _nesterov, _tables, _column_wise, _table_precision, _balance)
