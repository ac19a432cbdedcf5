"""Checks the rules of features, tables, columns and sources."""

import re
from collections.abc import Iterator

from recsys import protos as pb
from recsys.config import features as f
from recsys.config.checks.choices import loss_kind
from recsys.config.checks.walk import Finding, join
from recsys.config.declarations import model_of
from recsys.config.feature_kinds import FeatureKind, kinds

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")

_RESERVED = {
    f.REQUEST_TIME: "the time of the request",
    f.NEGATIVES: "the negatives of retrieval",
    f.PREFIX[pb.HISTORY] + f.TIMESTAMPS: "the times of events",
    f.PREFIX[pb.HISTORY] + f.ACTIONS: "the actions of events",
    f.PREFIX[pb.HISTORY] + f.WATCH_TIME: "the watch times of events",
    f.PREFIX[pb.CANDIDATE] + f.TIMESTAMPS: "the times of candidates",
}


def _names(pipeline: pb.Pipeline) -> Iterator[Finding]:
    seen: dict[str, int] = {}
    for index, kind in enumerate(kinds(pipeline)):
        feature, path = kind.feature, f"features[{index}]"
        table = kind.table if kind.table != feature.name else None
        for field, name in ((f"{path}.name", feature.name), (f"{kind.path}.table", table)):
            if name and not _NAME.match(name):
                problem = f"{name!r} is given; use letters, digits and _, no digit first"
                yield Finding(field, problem)
        if feature.name in seen:
            first = seen[feature.name]
            yield Finding(
                f"{path}.name", f"{feature.name!r} is also features[{first}]; rename one or join their sides"
            )
        seen.setdefault(feature.name, index)
        prefix = next((x for x in f.PREFIX.values() if x and feature.name.startswith(x)), None)
        if prefix and pb.USER in feature.sides:
            problem = f"{feature.name!r} is a USER feature, but {prefix} begins the columns of another side"
            yield Finding(f"{path}.name", f"{problem}; rename it")
        if len(set(feature.sides)) < len(feature.sides):
            yield Finding(f"{path}.sides", "a side is named twice; name each once")


def _columns(pipeline: pb.Pipeline) -> Iterator[Finding]:
    """Two features, or a feature and a fixed column, must not share a key of the batch."""
    owners: dict[str, str] = {}
    for index, kind in enumerate(kinds(pipeline)):
        feature, path = kind.feature, f"features[{index}].name"
        for side in sorted(set(feature.sides)):
            column = f.PREFIX.get(side, "") + feature.name
            if column in _RESERVED:
                yield Finding(path, f"its column {column} holds {_RESERVED[column]}; choose another name")
            elif owners.get(column, feature.name) != feature.name:
                yield Finding(
                    path, f"its column {column} is also that of feature {owners[column]}; rename one of them"
                )
            owners.setdefault(column, feature.name)


def _read(pipeline: pb.Pipeline) -> Iterator[Finding]:
    """A feature must read columns of its side, and all features that read a column must find lists in it, or
    none of them."""
    readers: dict[str, FeatureKind] = {}
    for kind in kinds(pipeline):
        for side in sorted({pb.USER, pb.HISTORY, pb.CANDIDATE} & set(kind.feature.sides)):
            for column in kind.columns(side):
                if f.side_of(column) != side and column != f.PREFIX[side] + kind.feature.name:
                    prefix = (
                        f"must begin with {f.PREFIX[side]}" if f.PREFIX[side] else "has one value per row"
                    )
                    problem = f"it reads the column {column} on side {pb.Side.Name(side)}, where a column"
                    yield Finding(kind.path, f"{problem} {prefix}")
                first = readers.setdefault(column, kind)
                if first.lists != kind.lists:
                    problem = f"it reads the column {column}, in which feature {first.feature.name} finds"
                    wanted = "lists" if first.lists else "single values"
                    yield Finding(kind.path, f"{problem} {wanted}; choose another column")


def _inputs(pipeline: pb.Pipeline) -> set[str]:
    """Returns the columns that features read."""
    by_side = [(kind, side) for kind in kinds(pipeline) for side in kind.feature.sides if side in f.PREFIX]
    return {column for kind, side in by_side for column in kind.columns(side)}


def _labels(pipeline: pb.Pipeline) -> Iterator[Finding]:
    """A label must be neither an input nor a reserved column."""
    inputs = _inputs(pipeline)
    model = model_of(pipeline)
    for index, task in enumerate(model.tasks):
        path = f"{model.path}.tasks[{index}]"
        if task.label in inputs:
            yield Finding(
                f"{path}.label",
                f"{task.label} is also an input: the model would read the answer; remove the feature",
            )
        if task.label in _RESERVED:
            yield Finding(
                f"{path}.label", f"{task.label} holds {_RESERVED[task.label]}; choose another column"
            )


def _weights(pipeline: pb.Pipeline) -> Iterator[Finding]:
    """A column with weights of a loss must have a side that the loss supports, and no other meaning.

    It may neither be an input, nor be reserved, nor hold label bits. It may be a label that is a number, such
    as a watch time.
    """
    model, inputs = model_of(pipeline), _inputs(pipeline)
    bits = {task.label for task in model.tasks if task.label_bits}
    for column, path in model.weight_columns():
        if f.side_of(column) not in model.weight_sides:
            lists = " or ".join(f"{f.PREFIX[side]}*" for side in model.weight_sides if f.PREFIX[side])
            problem = f"{column} is given; a {model.kind} has weights in lists {lists}, or one number per row"
            yield Finding(path, problem)
        if column in inputs:
            problem = f"{column} is also the column of a feature; write the weights to a column of their own"
            yield Finding(path, problem)
        if column in _RESERVED:
            yield Finding(path, f"{column} holds {_RESERVED[column]}; choose another column")
        if column in bits:
            yield Finding(path, f"{column} holds labels as bits; choose another column")


def _label_bits(pipeline: pb.Pipeline) -> Iterator[Finding]:
    """Labels that are bits of a column must agree with the other users of that column and with their loss."""
    model = model_of(pipeline)
    tasks = model.tasks
    first: dict[str, int] = {}
    for index, task in enumerate(tasks):
        path = f"{model.path}.tasks[{index}]"
        earlier = first.setdefault(task.label, index)
        if task.label and bool(tasks[earlier].label_bits) != bool(task.label_bits):
            forms = ("its bits", "it as a number") if task.label_bits else ("it as a number", "its bits")
            problem = f"{task.label} is one column; this task reads {forms[0]}, tasks[{earlier}] {forms[1]}"
            yield Finding(f"{path}.label_bits", f"{problem}; give them columns of their own")
        if len(set(task.label_bits)) < len(task.label_bits):
            yield Finding(f"{path}.label_bits", "a bit is named twice; name each once")
        if task.label_bits and loss_kind(task.loss) == "regression":
            problem = "bits make labels 0 and 1, but the loss is a regression loss"
            yield Finding(
                f"{path}.label_bits", f"{problem}; remove label_bits, or choose a loss of binary labels"
            )


def _predictions(pipeline: pb.Pipeline) -> Iterator[Finding]:
    """Columns of predictions must have different names."""
    keys, model = list(pipeline.data.key_columns), model_of(pipeline)
    for name in dict.fromkeys(key for key in keys if keys.count(key) > 1):
        yield Finding("data.key_columns", f"{name!r} is named twice; name each once")
    taken = dict.fromkeys(keys, "data.key_columns")
    if model.item_feature is None:
        taken[f.candidate_item(pipeline) or ""] = "the candidates"
        for index, task in enumerate(model.tasks):
            if task.name and task.name in taken:
                problem = f"{task.name!r} is also a column of predictions, that of {taken[task.name]}"
                yield Finding(f"{model.path}.tasks[{index}].name", f"{problem}; choose another name")
    else:
        for name in (model.item_feature, f.SCORE):
            if name in taken:
                problem = f"{name!r} is also what predictions call recommended items or their scores"
                yield Finding("data.key_columns", f"{problem}; rename this column")


def _tables(pipeline: pb.Pipeline) -> Iterator[Finding]:
    """Features of one table must map ids the same way, to rows of one width."""
    first: dict[str, int] = {}
    every = kinds(pipeline)
    for index, kind in enumerate(every):
        if not kind.table:
            continue
        first_index = first.setdefault(kind.table, index)
        if first_index == index:
            continue
        earlier = every[first_index]
        if type(earlier) is not type(kind):
            problem = f"table {kind.table} belongs to features[{first_index}]; give one of them another table"
            yield Finding(f"{kind.feature_path}.name", problem)
            continue
        facts = earlier.table_facts()
        for field, value in kind.table_facts().items():
            if value != facts[field]:
                text = (
                    f"{value}, but features[{first_index}] of the same table {kind.table} has {facts[field]}"
                )
                yield Finding(join(kind.path, field) if field else kind.path, f"{text}; make them equal")


def _widths(pipeline: pb.Pipeline) -> Iterator[Finding]:
    """Sharded tables need widths divisible by 4, because FBGEMM moves four numbers at a time."""
    for kind in kinds(pipeline):
        if kind.table is None or not f.is_sharded(pipeline, kind.table):
            continue
        width = kind.input_width
        if width > 0 and width % 4:
            problem = (
                f"{width} is given; the width of a sharded table must be a multiple of 4. Change it, or set"
            )
            yield Finding(kind.width_path, f"{problem} model.embedding.placement: REPLICATED")


def _vocabularies(pipeline: pb.Pipeline) -> Iterator[Finding]:
    for kind in kinds(pipeline):
        if kind.vocabulary is not None and not kind.vocabulary.file:
            yield Finding(
                f"{kind.path}.vocabulary.file",
                "not set; name the file here, or the folder of all vocabularies in data.vocabulary_dir",
            )


def _kinds(pipeline: pb.Pipeline) -> Iterator[Finding]:
    """Yields the findings of the kinds of features."""
    for kind in kinds(pipeline):
        yield from kind.findings()


def _csv(pipeline: pb.Pipeline) -> Iterator[Finding]:
    for name in ("train", "validation", "test"):
        csv, path = getattr(pipeline.data, name).csv, f"data.{name}.csv"
        if len(csv.delimiter) > 1 or csv.delimiter in ('"', "\n", "\r"):
            yield Finding(
                f"{path}.delimiter",
                f"{csv.delimiter!r} is given; it must be one character other than a quote",
            )
        if csv.delimiter == csv.list_delimiter:
            yield Finding(
                f"{path}.list_delimiter",
                "the same as delimiter, so lists could not be told from columns; change one",
            )


def _synthetic(pipeline: pb.Pipeline) -> Iterator[Finding]:
    for name in ("train", "validation", "test"):
        source, path = getattr(pipeline.data, name).synthetic, f"data.{name}.synthetic"
        for quantity in ("history_len", "candidates"):
            smallest, largest = getattr(source, f"min_{quantity}"), getattr(source, f"max_{quantity}")
            if smallest > largest:
                yield Finding(
                    f"{path}.min_{quantity}", f"{smallest} is given, above max_{quantity}, which is {largest}"
                )
        if source.history_len_exponent and source.min_history_len < 1:
            yield Finding(
                f"{path}.history_len_exponent",
                f"{source.history_len_exponent:g} is given, so that an empty history would have an infinite "
                f"weight; set {path}.min_history_len to at least 1",
            )


RULES = (
    _names,
    _columns,
    _read,
    _labels,
    _weights,
    _label_bits,
    _predictions,
    _tables,
    _widths,
    _vocabularies,
    _kinds,
    _csv,
    _synthetic,
)
