"""Checks the rules of single fields: ranges of numbers, fields that must be set, choices to be made."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from recsys import protos as pb
from recsys.config import fields
from recsys.config.checks.walk import Finding, descend, join
from recsys.config.registry import has_class
from recsys.config.textproto import enum_names


class Range(NamedTuple):
    """A test for allowed numbers, and their description in findings."""

    holds: Callable[[float], bool]
    words: str


ANY = Range(math.isfinite, "a finite number")
POSITIVE = Range(lambda x: 0 < x < math.inf, "above 0")
NOT_NEGATIVE = Range(lambda x: 0 <= x < math.inf, "0 or more")
COUNT = Range(lambda x: x >= 1, "1 or more")
LENGTH = Range(lambda x: 1 <= x <= 2**24, "from 1 to 16777216")
LENGTH_OR_NONE = Range(lambda x: 0 <= x <= 2**24, "from 0 to 16777216")
SHARE = Range(lambda x: 0 <= x <= 1, "from 0 to 1")
BELOW_ONE = Range(lambda x: 0 <= x < 1, "at least 0 and below 1")
CACHE = Range(lambda x: 0 < x <= 1, "above 0 and at most 1")
BIT = Range(lambda x: 0 <= x <= 62, "from 0 to 62, the bits of a non-negative int64")

RANGES: dict[type[Message], dict[str, Range]] = {
    pb.Data: {
        "batch_size": COUNT,
        "eval_batch_size": COUNT,
        "num_workers": NOT_NEGATIVE,
        "prefetch_batches": COUNT,
        "max_history_len": LENGTH,
        "max_candidates": LENGTH,
        "shuffle_row_groups": COUNT,
        "num_lanes": COUNT,
    },
    pb.StochasticLength: {"alpha": Range(lambda x: 1 < x <= 2, "above 1 and at most 2")},
    pb.SyntheticSource: {
        "num_rows": COUNT,
        "seed": NOT_NEGATIVE,
        "max_history_len": NOT_NEGATIVE,
        "max_candidates": COUNT,
        "min_history_len": NOT_NEGATIVE,
        "history_len_exponent": NOT_NEGATIVE,
        "min_candidates": NOT_NEGATIVE,
    },
    pb.BadRows: {"limit": NOT_NEGATIVE},
    pb.Export: {"parity_rows": COUNT, "parity_tolerance": POSITIVE, "max_batch_size": COUNT},
    pb.ExportTables: {"memory_map_above_bytes": NOT_NEGATIVE},
    pb.Predict: {"top_k": COUNT, "batch_size": COUNT, "candidates_per_microbatch": COUNT},
    pb.UserStore: {"host_mib": NOT_NEGATIVE, "device_mib": NOT_NEGATIVE},
    pb.UserFolder: {"mib": COUNT},
    pb.FaissIndex: {"recall_rows": NOT_NEGATIVE},
    pb.IdFeature: {"embedding_dim": COUNT},
    pb.Vocabulary: {"size": COUNT, "unknown_rate": BELOW_ONE},
    pb.HashBuckets: {"num_buckets": COUNT},
    pb.NumericFeature: {"fill": ANY},
    pb.Normalize: {"mean": ANY, "std": POSITIVE},
    pb.Bucketize: {"boundaries": ANY, "embedding_dim": COUNT},
    pb.BinaryCrossEntropy: {"positive_weight": POSITIVE, "label_smoothing": BELOW_ONE},
    pb.FocalLoss: {
        "gamma": NOT_NEGATIVE,
        "alpha": Range(lambda x: 0 < x < 1, "between 0 and 1"),
        "label_smoothing": BELOW_ONE,
    },
    pb.JrcLoss: {"pointwise_share": SHARE},
    pb.PairwiseLoss: {"pointwise_share": SHARE},
    pb.SoftmaxLoss: {"temperature": POSITIVE},
    pb.UniformNegatives: {"num_negatives": COUNT},
    pb.InBatchNegatives: {"num_uniform": NOT_NEGATIVE},
    pb.FrequencyNegatives: {"num_negatives": COUNT, "power": NOT_NEGATIVE},
    pb.LogLoss: {"eps": Range(lambda x: 0 < x < 0.5, "between 0 and 0.5")},
    pb.NormalizedEntropy: {"eps": Range(lambda x: 0 < x < 0.5, "between 0 and 0.5")},
    pb.HitRate: {"k": COUNT},
    pb.Ndcg: {"k": COUNT},
    pb.LayerGroup: {"num_layers": COUNT, "tail_len": LENGTH_OR_NONE},
    pb.AttentionBias: {"num_positions": COUNT, "num_time_buckets": NOT_NEGATIVE},
    pb.AttentionMask: {"window": LENGTH, "prefix": LENGTH_OR_NONE, "target_group_size": COUNT},
    pb.Model: {"embedding_dim": COUNT, "max_seq_len": COUNT},
    pb.Embedding: {"init_std": POSITIVE},
    pb.Sharding: {"cache_load_factor": CACHE},
    pb.TableSharding: {"cache_load_factor": CACHE},
    pb.Task: {"weight": NOT_NEGATIVE, "label_bits": BIT},
    pb.MmoeHead: {"num_experts": COUNT, "expert_dim": COUNT},
    pb.PleHead: {
        "num_levels": COUNT,
        "num_shared_experts": COUNT,
        "num_task_experts": COUNT,
        "expert_dim": COUNT,
    },
    pb.AdamW: {
        "lr": POSITIVE,
        "beta1": BELOW_ONE,
        "beta2": BELOW_ONE,
        "eps": POSITIVE,
        "weight_decay": NOT_NEGATIVE,
    },
    pb.Sgd: {"lr": POSITIVE, "momentum": BELOW_ONE, "weight_decay": NOT_NEGATIVE},
    pb.Adagrad: {"lr": POSITIVE, "eps": POSITIVE, "weight_decay": NOT_NEGATIVE},
    pb.Lamb: {
        "lr": POSITIVE,
        "beta1": BELOW_ONE,
        "beta2": BELOW_ONE,
        "eps": POSITIVE,
        "weight_decay": NOT_NEGATIVE,
    },
    pb.Muon: {
        "lr": POSITIVE,
        "momentum": BELOW_ONE,
        "weight_decay": NOT_NEGATIVE,
        "beta1": BELOW_ONE,
        "beta2": BELOW_ONE,
        "eps": POSITIVE,
    },
    pb.ParameterGroup: {"lr_scale": NOT_NEGATIVE, "weight_decay": NOT_NEGATIVE},
    pb.RowWiseAdagrad: {"lr": POSITIVE, "eps": POSITIVE},
    pb.SparseAdam: {"lr": POSITIVE, "beta1": BELOW_ONE, "beta2": BELOW_ONE, "eps": POSITIVE},
    pb.SparseSgd: {"lr": POSITIVE},
    pb.SparseAdagrad: {"lr": POSITIVE, "eps": POSITIVE},
    pb.PartialRowWiseAdam: {"lr": POSITIVE, "beta1": BELOW_ONE, "beta2": BELOW_ONE, "eps": POSITIVE},
    pb.Schedule: {"warmup_steps": NOT_NEGATIVE},
    pb.LinearDecay: {"final_factor": SHARE},
    pb.CosineDecay: {"final_factor": SHARE},
    pb.StepDecay: {"every_steps": COUNT, "factor": Range(lambda x: 0 < x < 1, "between 0 and 1")},
    pb.PolynomialDecay: {"power": POSITIVE, "final_factor": SHARE},
    pb.CosineRestarts: {"first_steps": COUNT, "growth": COUNT, "final_factor": SHARE},
    pb.L2NormPostprocessor: {"eps": POSITIVE},
    pb.LayerNormPostprocessor: {"eps": POSITIVE},
    pb.TimestampLayerNormPostprocessor: {
        "eps": POSITIVE,
        "utc_offset_minutes": Range(lambda x: abs(x) <= 14 * 60, "from -840 to 840"),
    },
    pb.ContextualPreprocessor: {"dropout": BELOW_ONE},
    pb.UihPreprocessor: {"dropout": BELOW_ONE},
    pb.JoinedContextualTokens: {"num_tokens": LENGTH},
    pb.ConcatenatedActions: {"dim": COUNT},
    pb.ContextualizedMlp: {"context_dim": COUNT, "hidden": COUNT, "rank": COUNT},
    pb.Mlp: {"hidden": COUNT, "dropout": BELOW_ONE},
    pb.ActionEncoder: {"watch_time_thresholds": POSITIVE},
    pb.ActionBit: {"bit": BIT},
    pb.HistoryChannel: {"bits": BIT, "min_watch_time": NOT_NEGATIVE, "max_events": LENGTH},
    pb.PositionalEncoder: {"num_positions": COUNT, "num_time_buckets": NOT_NEGATIVE, "time_unit": POSITIVE},
    pb.Train: {
        "num_epochs": COUNT,
        "num_steps": COUNT,
        "seed": NOT_NEGATIVE,
        "max_grad_norm": POSITIVE,
        "accumulate_batches": COUNT,
        "log_every_steps": COUNT,
        "rank_timeout": COUNT,
    },
    pb.Ema: {"decay": BELOW_ONE, "every_steps": COUNT},
    pb.Swa: {"start_step": COUNT, "every_steps": COUNT},
    pb.Evaluation: {"every_steps": COUNT, "max_batches": COUNT, "patience": COUNT},
    pb.Checkpoint: {
        "every_steps": COUNT,
        "keep": Range(lambda x: x >= 2, "2 or more: the newest may be damaged when it is needed"),
    },
}
"""Allowed values of each number, or of each element of a list, by message and field; a test finds gaps.
`limit` adds the ranges of families and mixers when they are declared."""

REQUIRED: dict[type[Message], tuple[str, ...]] = {
    pb.Pipeline: ("features",),
    pb.Data: ("train",),
    pb.ParquetSource: ("paths",),
    pb.CsvSource: ("paths", "delimiter", "list_delimiter"),
    pb.Feature: ("name", "sides"),
    pb.HashBuckets: ("num_buckets",),
    pb.PretrainedRows: ("parquet", "id_column", "vector_column"),
    pb.Bucketize: ("boundaries",),
    pb.Task: ("name", "loss"),
    pb.ActionBit: ("name", "bit"),
    pb.HistoryChannel: ("name",),
    pb.ParameterGroup: ("parameters",),
    pb.EmbeddingTable: ("table",),
    pb.TableSharding: ("table",),
    pb.StepDecay: ("every_steps",),
    pb.CosineRestarts: ("first_steps",),
    pb.Swa: ("start_step",),
    pb.InitFrom: ("path",),
    pb.FaissIndex: ("factory",),
}
"""Fields that must be set, and not to an empty string or list, by message; `limit` adds fields here too."""


def limit(
    message: type[Message], ranges: Mapping[str, Range] | None = None, *, required: Sequence[str] = ()
) -> None:
    """Adds a message to `RANGES` and `REQUIRED`; the declaration of a component calls it."""
    if ranges:
        RANGES[message] = dict(ranges)
    if required:
        REQUIRED[message] = tuple(required)


def numbers(pipeline: pb.Pipeline) -> Iterator[Finding]:
    """Numbers must be in their range."""
    for message, path in descend(pipeline):
        ranges = RANGES.get(type(message), {})
        for field, value in message.ListFields() if ranges else ():
            if field.name not in ranges:
                continue
            holds, words = ranges[field.name]
            place = join(path, field.name)
            elements = (
                [(f"{place}[{i}]", x) for i, x in enumerate(value)] if field.is_repeated else [(place, value)]
            )
            for where, number in elements:
                if not holds(number):
                    yield Finding(where, f"{number} is given; it must be {words}")


def _required(pipeline: pb.Pipeline) -> Iterator[Finding]:
    for message, path in descend(pipeline):
        by_name = message.DESCRIPTOR.fields_by_name
        for name in REQUIRED.get(type(message), ()):
            if not (getattr(message, name) if _can_be_empty(by_name[name]) else message.HasField(name)):
                yield Finding(join(path, name), "not set, but required", missing=True)


def _can_be_empty(field: FieldDescriptor) -> bool:
    return field.is_repeated or field.cpp_type == FieldDescriptor.CPPTYPE_STRING


def _choices(pipeline: pb.Pipeline) -> Iterator[Finding]:
    for message, path in descend(pipeline):
        if message.DESCRIPTOR.is_extendable:
            yield from _choice(message, path)
            continue
        for oneof in message.DESCRIPTOR.oneofs:
            if message.WhichOneof(oneof.name) is None:
                names = ", ".join(field.name for field in oneof.fields)
                yield Finding(path or oneof.name, f"nothing is chosen; set one of {names}", missing=True)


def _choice(holder: Message, path: str) -> Iterator[Finding]:
    """A holder takes one alternative, and a message of another package needs a registered class."""
    alternatives = fields.alternatives(holder)
    names = [fields.name_of(field) for field in alternatives if fields.is_set(holder, field)]
    if not names:
        allowed = ", ".join(map(fields.name_of, alternatives)) or "the extensions of an imported package"
        yield Finding(path, f"nothing is chosen; set one of {allowed}", missing=True)
    if len(names) > 1:
        yield Finding(path, f"only one of these may be set, but {' and '.join(names)} are; keep one")
    for field in alternatives:
        if field.is_extension and fields.is_set(holder, field) and not has_class(fields.type_of(field)):
            message = field.message_type.full_name
            problem = (
                f"no class is registered for {message}; write @register({field.message_type.name}) above one"
            )
            yield Finding(join(path, fields.name_of(field)), f"{problem}, in a module that is imported")


def _enums(pipeline: pb.Pipeline) -> Iterator[Finding]:
    for message, path in descend(pipeline):
        for field, value in message.ListFields():
            if field.enum_type is None:
                continue
            values = field.enum_type.values_by_number
            for number in value if field.is_repeated else [value]:
                if number == 0 or number not in values:
                    allowed = ", ".join(enum_names(field))
                    yield Finding(
                        join(path, field.name),
                        f"{number} is not one of its values; it must be one of {allowed}",
                    )


RULES = (_required, _choices, _enums)
