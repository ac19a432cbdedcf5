"""Fills in values that a config leaves open, from defaults or other parts of the config, with their origins.

`config` re-exports `resolve`. Code that gets a resolved config reads fields and needs no second default: the
message holds every value that a proto comment describes as "Absent: ...", unless absence itself has a meaning
(no limit, no bias). A wrong config is resolved as far as possible; `checks` reports what is wrong.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from recsys import protos as pb
from recsys.config import checks, features, fields
from recsys.config.checks import Finding, choices
from recsys.config.checks.train import sharded
from recsys.config.checks.walk import descend
from recsys.config.declarations import Choice, mixer_of, model_of
from recsys.config.feature_kinds import kinds
from recsys.config.features import ACTIONS, PREFIX
from recsys.errors import ConfigError

_IMPLIED = {
    pb.Pipeline: ("data", "model", "train", "export", "predict"),
    pb.Data: ("bad_rows",),
    pb.Model: ("embedding",),
    pb.Train: ("dense_optimizer", "schedule", "evaluation", "checkpoint"),
    pb.DenseOptimizer: ("adamw",),
    pb.SparseOptimizer: ("row_wise_adagrad",),
    pb.Schedule: ("constant",),
    pb.WeightAveraging: ("ema",),
    pb.ContextualPreprocessor: ("content",),
    pb.JoinedContextualTokens: ("mlp",),
    pb.ConcatenatedActions: ("mlp",),
    pb.LayerGroup: ("mask",),
    pb.FusionHead: ("mlp",),
    pb.MmoeHead: ("expert", "gate", "tower"),
    pb.PleHead: ("expert", "gate", "tower"),
    pb.PairwiseLoss: ("binary_cross_entropy",),
    pb.SoftmaxLoss: ("full",),
}
"""Fields whose message has the same meaning when it is absent as when it is empty."""

_CACHE_LOAD_FACTOR = 0.2
_LARGEST_INT32 = 2**31 - 1
_NO_FILE = "no file"


class Resolved(NamedTuple):
    """A config in which no value is left open.

    Attributes:
        pipeline: a new message.
        origins: the origin of each value that was filled in, or `default`, by field path.
    """

    pipeline: pb.Pipeline
    origins: dict[str, str]


def resolve(
    pipeline: pb.Pipeline, *, read_files: bool = True, locations: dict[str, str] | None = None
) -> Resolved:
    """Fills in absent values and keeps present ones, so resolving twice changes nothing.

    Args:
        pipeline: as loaded; it is not changed.
        read_files: also fill in `vocabulary.size` from the vocabularies' files.
        locations: the location of each field, by field path, as `config.read` returns it; it begins findings.

    Raises:
        ConfigError: a vocabulary file is missing, is not a vocabulary, or has another size than the config
            says.
    """
    result = pb.Pipeline()
    result.CopyFrom(pipeline)
    origins: dict[str, str] = {}
    _imply(result, "", origins)
    _layers(result, origins)
    if sharded(result):
        planned = result.train.HasField("sharding_plan")
        names = ("sparse_optimizer",) if planned else ("sparse_optimizer", "sharding")
        _imply_fields(result.train, "train", names, origins)
        _imply(result.train, "train", origins)
    for part in (_features, _data, _model, _tables, _tasks, _train, _export):
        for choice in part(result):
            _fill(choice, origins)
    _defaults(result, "", origins)
    if read_files:
        findings = _vocabulary_sizes(result, origins)
        if findings:
            raise ConfigError(checks.lines(findings, locations or {}))
    for choice in model_of(result).choices_by_size():
        _fill(choice, origins)
    return Resolved(result, origins)


def _fill(choice: Choice, origins: dict[str, str]) -> None:
    message, field, value = choice.message, choice.field, choice.value
    int32 = message.DESCRIPTOR.fields_by_name[field].cpp_type == FieldDescriptor.CPPTYPE_INT32
    if message.HasField(field) or (int32 and value > _LARGEST_INT32):
        return
    setattr(message, field, value)
    origins[f"{choice.path}.{field}"] = choice.origin


def _imply(message: Message, path: str, origins: dict[str, str]) -> None:
    """Creates the messages of `_IMPLIED` in `message` and in all messages inside it."""
    _imply_fields(message, path, _IMPLIED.get(type(message), ()), origins)
    for inner, place in checks.children(message, path):
        _imply(inner, place, origins)


def _imply_fields(message: Message, path: str, names: tuple[str, ...], origins: dict[str, str]) -> None:
    for name in names:
        field = message.DESCRIPTOR.fields_by_name[name]
        if any(fields.is_set(message, rival) for rival in (field, *fields.rivals(message, field))):
            continue
        getattr(message, name).SetInParent()
        origins[checks.join(path, name)] = "default"


def _defaults(message: Message, path: str, origins: dict[str, str]) -> None:
    """Writes the proto's defaults into `message` and all messages inside it.

    A default that changes then shows as a difference between resolved configs.
    """
    for field in message.DESCRIPTOR.fields:
        if field.has_default_value and not message.HasField(field.name):
            setattr(message, field.name, field.default_value)
            origins[checks.join(path, field.name)] = "default"
    for inner, place in checks.children(message, path):
        _defaults(inner, place, origins)


def _features(pipeline: pb.Pipeline) -> Iterator[Choice]:
    folder = pipeline.data.vocabulary_dir
    for kind in kinds(pipeline):
        yield from kind.choices(pipeline)
        if kind.vocabulary is not None and folder:
            file = f"{folder.rstrip('/')}/{kind.table}.parquet"
            field = kind.path.removeprefix(f"{kind.feature_path}.")
            origin = f"data.vocabulary_dir and {field}.table"
            yield Choice(kind.vocabulary, f"{kind.path}.vocabulary", "file", file, origin)


def _data(pipeline: pb.Pipeline) -> Iterator[Choice]:
    data = pipeline.data
    yield Choice(data, "data", "eval_batch_size", data.batch_size, "data.batch_size")
    if data.key_columns:
        yield Choice(data, "data", "group_column", data.key_columns[0], "data.key_columns[0]")


def _model(pipeline: pb.Pipeline) -> Iterator[Choice]:
    model, data, family = pipeline.model, pipeline.data, model_of(pipeline)
    if not family.kind:
        return
    if not family.has_targets:
        yield Choice(model, "model", "max_seq_len", data.max_history_len, "data.max_history_len")
    elif data.HasField("max_candidates"):
        factor = checks.tokens_per_event(pipeline)
        total = checks.num_contextual(pipeline) + factor * data.max_history_len + data.max_candidates
        history = "2 x data.max_history_len" if factor == 2 else "data.max_history_len"
        origin = f"contextual tokens + {history} + data.max_candidates"
        yield Choice(model, "model", "max_seq_len", total, origin)
    yield from family.choices()
    mixer = mixer_of(pipeline)
    if mixer is not None:
        yield from mixer.choices()
    if family.preprocessor is None or not model.HasField("max_seq_len"):
        return
    positional = choices.part(family.preprocessor, "positional")
    if positional is not None:
        name = fields.name_of(fields.chosen(family.config.preprocessor))
        path = f"{family.path}.preprocessor.{name}.positional"
        yield Choice(positional, path, "num_positions", model.max_seq_len + 1, "model.max_seq_len + 1")


def _layers(pipeline: pb.Pipeline, origins: dict[str, str]) -> None:
    """Gives each stack without layer groups its default settings, and converts all lengths to tokens."""
    factor = checks.tokens_per_event(pipeline)
    for message, path in descend(pipeline.model, "model"):
        if "layer_groups" in message.DESCRIPTOR.fields_by_name and not message.layer_groups:
            _imply_fields(message, path, ("mask",), origins)
            _fill(Choice(message, path, "num_layers", pb.LayerGroup().num_layers, "default"), origins)
        if isinstance(message, pb.AttentionMask):
            _to_tokens(message, path, "unit", ("window", "prefix"), factor, origins)
        if isinstance(message, pb.LayerGroup):
            _to_tokens(message, path, "tail_unit", ("tail_len",), factor, origins)


def _to_tokens(
    message: Message, path: str, unit: str, names: tuple[str, ...], factor: int, origins: dict[str, str]
) -> None:
    """Converts lengths in events to tokens; an impossible length stays, so that `checks` can report it."""
    if getattr(message, unit) != pb.EVENTS:
        return
    setattr(message, unit, pb.TOKENS)
    origins[checks.join(path, unit)] = "EVENTS is given"
    for name in names:
        events = getattr(message, name)
        if 0 < events <= _LARGEST_INT32 // factor:
            setattr(message, name, events * factor)
            origins[checks.join(path, name)] = f"{events} events, tokens of an event: {factor}"


def _tasks(pipeline: pb.Pipeline) -> Iterator[Choice]:
    model = model_of(pipeline)
    for index, task in enumerate(model.tasks):
        path = f"{model.path}.tasks[{index}]"
        if task.label_bits:
            yield Choice(task, path, "label", f"{PREFIX[pb.CANDIDATE]}{ACTIONS}", f"{path}.label_bits")
        elif task.name:
            yield Choice(task, path, "label", f"{PREFIX[pb.CANDIDATE]}{task.name}", f"{path}.name")


def _train(pipeline: pb.Pipeline) -> Iterator[Choice]:
    train = pipeline.train
    if train.HasField("sharding"):
        yield from _sharding(train.sharding)
    named = [metric.name for metric in checks.metric_names(pipeline) if metric.directed]
    if named:
        yield Choice(
            train.evaluation, "train.evaluation", "best_metric", named[0], "first metric of the model"
        )


def _sharding(sharding: pb.Sharding) -> Iterator[Choice]:
    """Yields the settings that tables take over from the settings of all tables."""
    caching, path = pb.TableSharding.FUSED_UVM_CACHING, "train.sharding"
    if sharding.kernel == caching:
        yield Choice(sharding, path, "cache_load_factor", _CACHE_LOAD_FACTOR, "default")
    for index, table in enumerate(sharding.tables):
        place = f"{path}.tables[{index}]"
        yield Choice(table, place, "kind", sharding.kind, f"{path}.kind")
        yield Choice(table, place, "kernel", sharding.kernel, f"{path}.kernel")
        if table.kernel == caching:
            share = sharding.cache_load_factor or _CACHE_LOAD_FACTOR
            yield Choice(table, place, "cache_load_factor", share, f"{path}.cache_load_factor or default")


def _tables(pipeline: pb.Pipeline) -> Iterator[Choice]:
    """Yields the settings that embedding tables take over from the settings of all tables."""
    embedding, path = pipeline.model.embedding, "model.embedding"
    for index, table in enumerate(embedding.tables):
        place = f"{path}.tables[{index}]"
        yield Choice(table, place, "placement", embedding.placement, f"{path}.placement")
        if features.is_sharded(pipeline, table.table):
            yield Choice(
                table, place, "table_precision", embedding.table_precision, f"{path}.table_precision"
            )


def _export(pipeline: pb.Pipeline) -> Iterator[Choice]:
    tolerance = parity_tolerance(pipeline.model.precision)
    yield Choice(pipeline.export, "export", "parity_tolerance", tolerance, "model.precision")


def parity_tolerance(precision: int) -> float:
    """Returns by how much a package's answers may differ from its model's in a precision of pb."""
    return {pb.BF16: 2e-2, pb.FP16: 5e-3}.get(precision, 1e-4)


def _vocabulary_sizes(pipeline: pb.Pipeline, origins: dict[str, str]) -> list[Finding]:
    """Fills in the sizes of vocabularies, and returns findings about their files."""
    findings: list[Finding] = []
    sizes: dict[str, int | str] = {}
    for kind in kinds(pipeline):
        vocabulary = kind.vocabulary
        if vocabulary is None or not vocabulary.file:
            continue
        if vocabulary.file not in sizes:
            sizes[vocabulary.file] = _count_ids(vocabulary.file)
        size, path = sizes[vocabulary.file], f"{kind.path}.vocabulary"
        if isinstance(size, str):
            findings.append(Finding(f"{path}.file", size))
        elif vocabulary.HasField("size") and vocabulary.size != size:
            problem = (
                f"{vocabulary.size} is given, {vocabulary.file} has {size} ids; use the file that the config "
            )
            problem += "was made for, or leave size out to read it"
            findings.append(Finding(f"{path}.size", problem))
        else:
            _fill(Choice(vocabulary, path, "size", size, vocabulary.file), origins)
    return _together(findings, len(sizes), pipeline.data.vocabulary_dir)


def _together(findings: list[Finding], vocabularies: int, folder: str) -> list[Finding]:
    """Replaces the findings by a single one if no vocabulary exists, because then the data is not
    prepared."""
    missing = {finding.text for finding in findings if finding.text.startswith(_NO_FILE)}
    if not folder or len(missing) < max(vocabularies, 2):
        return findings
    missing_all = f"none of {vocabularies} vocabularies is in {folder}"
    problem = f"{missing_all}; prepare the data first, with python -m recsys.prepare"
    return [Finding("data.vocabulary_dir", problem + _from_here(folder))]


def _from_here(path: str) -> str:
    """Says which folder a relative path starts from, because the folder may be the fault."""
    return "" if "://" in path or Path(path).is_absolute() else f". Relative paths count from {Path.cwd()}"


def _count_ids(file: str) -> int | str:
    """Returns the number of ids of a vocabulary, read from the file's footer, or a text about its fault."""
    # Imported here, so that a config can be read and checked without these libraries.
    import fsspec
    import pyarrow as pa
    import pyarrow.parquet as pq

    advice = "python -m recsys.prepare writes it beside the data"
    try:
        with fsspec.open(file, "rb") as opened:
            parquet = pq.ParquetFile(opened)
            schema, count = parquet.schema_arrow, parquet.metadata.num_rows
    except FileNotFoundError:
        return f"{_NO_FILE} {file}; {advice}{_from_here(file)}"
    except (OSError, pa.ArrowInvalid, ValueError, ImportError) as error:
        return f"{file} cannot be read as parquet: {str(error).splitlines()[0] if str(error) else error!r}"
    if schema.names.count("id") != 1:
        return f"{file} has no column id, or several; it has {', '.join(schema.names)}; {advice}"
    kind = schema.field("id").type
    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_integer(inner) or pa.types.is_string(inner) or pa.types.is_large_string(inner)):
        return f"{file}: its column id is {kind}; ids are integers or strings; {advice}"
    return count or f"{file} has no ids; {advice}"
