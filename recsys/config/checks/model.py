"""Rules of models, losses and metrics."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from recsys import protos as pb
from recsys.config.checks import choices
from recsys.config.checks.sequence import num_contextual, tokens_per_event
from recsys.config.checks.walk import Finding, descend
from recsys.config.textproto import did_you_mean

BACKENDS = {"hstu": ("auto", "sm90", "triton", "reference")}
"""By mixer, the attention backends that a config may name."""


class MetricName(NamedTuple):
    """A metric as logs call it, e.g. `is_click/auc` or `ndcg@10`.

    Attributes:
        name: with its task in front for a ranker.
        path: of its message.
        directed: more is better, or less is; False when the best value lies in between.
    """

    name: str
    path: str
    directed: bool


def metric_names(pipeline: pb.Pipeline) -> list[MetricName]:
    """Metrics of the model in the config's order; metrics of which nothing is chosen are left out."""
    model = pipeline.model
    found = _named(model.retriever.metrics, "model.retriever", "")
    for index, task in enumerate(model.ranker.tasks):
        found += _named(task.metrics, f"model.ranker.tasks[{index}]", f"{task.name}/")
    return found


def loss_kind(loss: pb.Loss) -> str | None:
    """What the labels of a task with this loss are: binary, regression or retrieval.

    None for no loss, and for one of which the schema does not say it (`_losses` has a finding then).
    """
    field = choices.chosen(loss)
    if field is None:
        return None
    # A loss around another one takes the labels of that one.
    around = [choices.labels(inner) for inner, _ in getattr(loss, field.name).ListFields()]
    return next((kinds[0] for kinds in (*around, choices.labels(field)) if kinds), None)


def _named(metrics: Sequence[pb.Metric], path: str, prefix: str) -> list[MetricName]:
    found = []
    for index, metric in enumerate(metrics):
        field = choices.chosen(metric)
        if field is not None:
            config = getattr(metric, field.name)
            name = f"{field.name}@{config.k}" if "k" in config.DESCRIPTOR.fields_by_name else field.name
            found.append(MetricName(f"{prefix}{name}", f"{path}.metrics[{index}]", choices.directed(field)))
    return found


def fits_preprocessor(pipeline: pb.Pipeline) -> Iterator[Finding]:
    """Whether the model can take the sequences that its preprocessor makes."""
    kind = pipeline.model.WhichOneof("model")
    if kind is None:
        return
    body = getattr(pipeline.model, kind)
    given = choices.part(body, "preprocessor")
    field = choices.chosen(given) if given is not None else None
    if field is not None and kind not in choices.models(field):
        fitting = " or ".join(_fitting(pb.Preprocessor, choices.models, {kind}))
        yield Finding(f"model.{kind}.preprocessor.{field.name}", f"does not fit a {kind}; use {fitting}")


def _ranker(pipeline: pb.Pipeline) -> Iterator[Finding]:
    model = pipeline.model
    if not model.HasField("ranker"):
        return
    for side, what in ((pb.HISTORY, "history"), (pb.CANDIDATE, "candidates")):
        if pipeline.features and not any(side in feature.sides for feature in pipeline.features):
            name = pb.Side.Name(side)
            yield Finding(
                "features",
                f"no feature has the side {name}, so the {what} would have no content; add {name} to one",
            )
    names = Counter(task.name for task in model.ranker.tasks)
    for index, task in enumerate(model.ranker.tasks):
        path = f"model.ranker.tasks[{index}].name"
        if names[task.name] > 1:
            yield Finding(path, f"{task.name!r} is the name of {names[task.name]} tasks; rename all but one")
        if "/" in task.name or "." in task.name:
            yield Finding(path, f"{task.name!r} is given; leave out '/' and '.'")
    if model.ranker.tasks and all(task.weight == 0 for task in model.ranker.tasks):
        yield Finding(
            "model.ranker.tasks", "every weight is 0: nothing would be learned; give one task a weight"
        )


def _losses(pipeline: pb.Pipeline) -> Iterator[Finding]:
    for index, task in enumerate(pipeline.model.ranker.tasks):
        yield from _fits(task.loss, f"model.ranker.tasks[{index}].loss", {"binary", "regression"})
    yield from _fits(pipeline.model.retriever.loss, "model.retriever.loss", {"retrieval"})


def _fits(loss: pb.Loss, path: str, kinds: set[str]) -> Iterator[Finding]:
    field, kind = choices.chosen(loss), loss_kind(loss)
    if field is None or kind in kinds:
        return
    what = f"is a loss of {kind}" if kind else "protos/loss.proto does not say which labels it is for"
    allowed = ", ".join(_fitting(pb.Loss, choices.labels, kinds))
    yield Finding(f"{path}.{field.name}", f"{what}; use one of {allowed}")


def _fitting(
    choice: type[Message], fits: Callable[[FieldDescriptor], list[str]], kinds: set[str]
) -> list[str]:
    """Names of the choices that fit one of some kinds."""
    return [field.name for field in choice.DESCRIPTOR.fields if kinds & set(fits(field))]


def _metrics(pipeline: pb.Pipeline) -> Iterator[Finding]:
    model = pipeline.model
    yield from _fit(model.retriever.metrics, "model.retriever", "retrieval")
    for index, task in enumerate(model.ranker.tasks):
        kind = loss_kind(task.loss)
        if kind in ("binary", "regression"):
            yield from _fit(task.metrics, f"model.ranker.tasks[{index}]", kind)
    seen: dict[str, str] = {}
    for metric in metric_names(pipeline):
        if metric.name in seen:
            yield Finding(metric.path, f"{metric.name} is also {seen[metric.name]}; drop one")
        seen.setdefault(metric.name, metric.path)


def _fit(metrics: Sequence[pb.Metric], path: str, kind: str) -> Iterator[Finding]:
    for index, metric in enumerate(metrics):
        field = choices.chosen(metric)
        if field is not None and kind not in choices.labels(field):
            allowed = ", ".join(_fitting(pb.Metric, choices.labels, {kind}))
            yield Finding(
                f"{path}.metrics[{index}].{field.name}", f"does not fit a {kind} task; use one of {allowed}"
            )


def _groups(pipeline: pb.Pipeline) -> Iterator[Finding]:
    if pipeline.data.group_column:
        return
    for message, path in descend(pipeline.model, "model"):
        if isinstance(message, pb.Metric) and message.HasField("gauc"):
            what = "needs to know the user of a row; set data.key_columns or data.group_column"
            yield Finding(f"{path}.gauc", what)


def _mixers(pipeline: pb.Pipeline) -> Iterator[Finding]:
    width = pipeline.model.embedding_dim
    for message, path in _mixers_of(pipeline):
        if isinstance(message, pb.SasRecMixer) and message.num_heads > 0 and width % message.num_heads:
            what = f"{message.num_heads} does not divide model.embedding_dim, which is {width}"
            yield Finding(f"{path}.num_heads", what)
        if isinstance(message, pb.HstuMixer) and message.backend not in BACKENDS["hstu"]:
            what = (
                f"no backend is called {message.backend!r}. {did_you_mean(message.backend, BACKENDS['hstu'])}"
            )
            yield Finding(f"{path}.backend", what)
        if isinstance(message, pb.HstuMixer) and message.compile:
            again = [pb.Recompute.Name(one) for one in message.recompute if one in (pb.NORMED_X, pb.UVQK)]
            if again:
                what = f"what is compiled is not computed again: leave {' and '.join(again)} out of recompute"
                yield Finding(f"{path}.compile", f"{what}, or do not compile")


def _layer_groups(pipeline: pb.Pipeline) -> Iterator[Finding]:
    for message, path in _mixers_of(pipeline):
        for field in ("num_layers", "mask"):
            if message.layer_groups and message.HasField(field):
                what = "layer_groups is given too, where each group has its own; give one of the two"
                yield Finding(f"{path}.{field}", what)
        shortest = None
        for index, group in enumerate(message.layer_groups):
            if not group.HasField("tail_len"):
                continue
            place = f"{path}.layer_groups[{index}].tail_len"
            if shortest is not None and group.tail_len > shortest:
                what = (
                    f"{group.tail_len} tokens are given; an earlier group leaves {shortest}, so at most that"
                )
                yield Finding(place, what)
            shortest = group.tail_len if shortest is None else min(shortest, group.tail_len)


def _mixers_of(pipeline: pb.Pipeline) -> list[tuple[pb.HstuMixer | pb.SasRecMixer, str]]:
    kinds = (pb.HstuMixer, pb.SasRecMixer)
    return [(m, path) for m, path in descend(pipeline.model, "model") if isinstance(m, kinds)]


def _length(pipeline: pb.Pipeline) -> Iterator[Finding]:
    """The longest sequence must hold what the reader lets through."""
    model, data = pipeline.model, pipeline.data
    kind = model.WhichOneof("model")
    if kind is None:
        return
    if not model.HasField("max_seq_len"):
        what = "cannot be derived, since data.max_candidates is not set; set one of the two"
        yield Finding("model.max_seq_len", what)
        return
    factor = tokens_per_event(pipeline)
    needed = factor * data.max_history_len
    parts = f"{'2 x ' if factor == 2 else ''}data.max_history_len {data.max_history_len}"
    if kind == "ranker":
        contextual = num_contextual(pipeline)
        candidates = data.max_candidates or 1
        needed += contextual + candidates
        parts = f"{contextual} contextual tokens, {parts} and {candidates} candidates"
    if model.max_seq_len < needed:
        what = f"{model.max_seq_len} is given; {parts} need {needed}: give it as much, or lower those"
        yield Finding("model.max_seq_len", what)


RULES = (
    fits_preprocessor,
    _ranker,
    _losses,
    _metrics,
    _groups,
    _mixers,
    _layer_groups,
    _length,
)
