"""Checks the rules of models, losses, metrics and mixers that hold for every family."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from recsys import protos as pb
from recsys.config import fields
from recsys.config.checks import choices
from recsys.config.checks.sequence import num_contextual, tokens_per_event
from recsys.config.checks.walk import Finding, descend
from recsys.config.declarations import MetricList, mixer_of, model_of
from recsys.config.textproto import did_you_mean


class MetricName(NamedTuple):
    """A metric and its name in logs, e.g. `is_click/auc` or `ndcg@10`.

    Attributes:
        name: the metric's name, after the task's name if the model has tasks.
        path: path of the metric's message.
        directed: whether higher or lower values are better; False if the best value lies in between.
    """

    name: str
    path: str
    directed: bool


def metric_names(pipeline: pb.Pipeline) -> list[MetricName]:
    """Returns the metrics of the model in the config's order, except messages in which no metric is
    chosen."""
    return [name for metrics in model_of(pipeline).metrics() for name in _named(metrics)]


def _named(listed: MetricList) -> Iterator[MetricName]:
    for index, metric in enumerate(listed.metrics):
        field = fields.chosen(metric)
        if field is not None:
            config = fields.value_of(metric, field)
            name = f"{field.name}@{config.k}" if "k" in config.DESCRIPTOR.fields_by_name else field.name
            path = f"{listed.path}.metrics[{index}]"
            yield MetricName(f"{listed.prefix}{name}", path, choices.directed(field))


def fits_preprocessor(pipeline: pb.Pipeline) -> Iterator[Finding]:
    """A model must be able to take the sequences of its preprocessor."""
    model = model_of(pipeline)
    preprocessor_config = choices.part(model.config, "preprocessor")
    field = fields.chosen(preprocessor_config) if preprocessor_config is not None else None
    if field is not None and model.kind not in choices.models(field):
        fitting = " or ".join(_fitting(pb.Preprocessor, choices.models, {model.kind}))
        problem = f"does not fit a {model.kind}; use {fitting}"
        yield Finding(f"{model.path}.preprocessor.{fields.name_of(field)}", problem)


def _family(pipeline: pb.Pipeline) -> Iterator[Finding]:
    """Yields the findings of rules that the family of the model declares."""
    yield from model_of(pipeline).findings()


def _tasks(pipeline: pb.Pipeline) -> Iterator[Finding]:
    model = model_of(pipeline)
    names = Counter(task.name for task in model.tasks)
    for index, task in enumerate(model.tasks):
        path = f"{model.path}.tasks[{index}].name"
        if names[task.name] > 1:
            yield Finding(path, f"{task.name!r} is the name of {names[task.name]} tasks; rename all but one")
        if "/" in task.name or "." in task.name:
            yield Finding(path, f"{task.name!r} is given; leave out '/' and '.'")
    if model.tasks and all(task.weight == 0 for task in model.tasks):
        problem = "every weight is 0: nothing would be learned; give one task a weight"
        yield Finding(f"{model.path}.tasks", problem)


def _given(pipeline: pb.Pipeline) -> Iterator[Finding]:
    """A task that counts only candidates with label 1 of another task needs a binary task of that name."""
    model = model_of(pipeline)
    tasks = {task.name: task for task in model.tasks}
    for index, task in enumerate(model.tasks):
        name, path = task.given_task, f"{model.path}.tasks[{index}].given_task"
        if name and name == task.name:
            yield Finding(path, f"{name!r} is this task itself; name another one")
        elif name and name not in tasks:
            yield Finding(path, f"no task is called {name!r}. {did_you_mean(name, tasks)}")
        elif name and choices.loss_kind(tasks[name].loss) == "regression":
            problem = f"{name!r} is a regression; only a task with labels 0 and 1 says which candidates count"
            yield Finding(path, problem)


def _losses(pipeline: pb.Pipeline) -> Iterator[Finding]:
    for loss, path, kinds in model_of(pipeline).losses():
        field, kind = fields.chosen(loss), choices.loss_kind(loss)
        if field is None or kind in kinds:
            continue
        unsaid = f"{field.file.name.removeprefix('recsys/')} does not say which labels it is for"
        problem = f"is a loss of {kind}" if kind else unsaid
        allowed = ", ".join(_fitting(pb.Loss, choices.labels, kinds))
        yield Finding(f"{path}.{fields.name_of(field)}", f"{problem}; use one of {allowed}")


def _fitting(
    choice: type[Message], fits: Callable[[FieldDescriptor], list[str]], kinds: set[str] | frozenset[str]
) -> list[str]:
    """Returns the names of the choices that fit at least one of `kinds`."""
    return [fields.name_of(field) for field in fields.alternatives(choice) if kinds & set(fits(field))]


def _metrics(pipeline: pb.Pipeline) -> Iterator[Finding]:
    for metrics in model_of(pipeline).metrics():
        yield from _fit(metrics)
    seen: dict[str, str] = {}
    for metric in metric_names(pipeline):
        if metric.name in seen:
            yield Finding(metric.path, f"{metric.name} is also {seen[metric.name]}; remove one")
        seen.setdefault(metric.name, metric.path)


def _fit(listed: MetricList) -> Iterator[Finding]:
    if listed.kind is None:
        return
    for index, metric in enumerate(listed.metrics):
        field = fields.chosen(metric)
        if field is not None and listed.kind not in choices.labels(field):
            allowed = ", ".join(_fitting(pb.Metric, choices.labels, {listed.kind}))
            problem = f"does not fit a {listed.kind} task; use one of {allowed}"
            yield Finding(f"{listed.path}.metrics[{index}].{fields.name_of(field)}", problem)


def _groups(pipeline: pb.Pipeline) -> Iterator[Finding]:
    if pipeline.data.group_column:
        return
    for message, path in descend(pipeline.model, "model"):
        if isinstance(message, pb.Metric) and message.HasField("gauc"):
            problem = "needs to know the user of a row; set data.key_columns or data.group_column"
            yield Finding(f"{path}.gauc", problem)


def _mixer(pipeline: pb.Pipeline) -> Iterator[Finding]:
    """Yields the findings of rules that the mixer declares."""
    mixer = mixer_of(pipeline)
    if mixer is not None:
        yield from mixer.findings()


def _layer_groups(pipeline: pb.Pipeline) -> Iterator[Finding]:
    for message, path in descend(pipeline.model, "model"):
        if "layer_groups" not in message.DESCRIPTOR.fields_by_name:
            continue
        for field in ("num_layers", "mask"):
            if message.layer_groups and message.HasField(field):
                problem = "layer_groups is given too, where each group has its own; give one of the two"
                yield Finding(f"{path}.{field}", problem)
        shortest = None
        for index, group in enumerate(message.layer_groups):
            if not group.HasField("tail_len"):
                continue
            place = f"{path}.layer_groups[{index}].tail_len"
            if shortest is not None and group.tail_len > shortest:
                problem = (
                    f"{group.tail_len} tokens are given; an earlier group leaves {shortest}, so at most that"
                )
                yield Finding(place, problem)
            shortest = group.tail_len if shortest is None else min(shortest, group.tail_len)


def _length(pipeline: pb.Pipeline) -> Iterator[Finding]:
    """`model.max_seq_len` must be large enough for the longest row that the reader passes on."""
    model, data = pipeline.model, pipeline.data
    family = model_of(pipeline)
    if not family.kind:
        return
    if not model.HasField("max_seq_len"):
        problem = "cannot be derived, since data.max_candidates is not set; set one of the two"
        yield Finding("model.max_seq_len", problem)
        return
    factor = tokens_per_event(pipeline)
    needed = factor * data.max_history_len
    parts = f"{'2 x ' if factor == 2 else ''}data.max_history_len {data.max_history_len}"
    if family.has_targets:
        contextual = num_contextual(pipeline)
        candidates = data.max_candidates or 1
        needed += contextual + candidates
        parts = f"{contextual} contextual tokens, {parts} and {candidates} candidates"
    if model.max_seq_len < needed:
        problem = f"{model.max_seq_len} is given; {parts} need {needed}: raise it, or lower those"
        yield Finding("model.max_seq_len", problem)


RULES = (
    fits_preprocessor,
    _family,
    _tasks,
    _given,
    _losses,
    _metrics,
    _groups,
    _mixer,
    _layer_groups,
    _length,
)
