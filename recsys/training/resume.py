"""Checks that a config fits the state in a run folder, to resume training or to use its weights.

A run resumes automatically if its folder holds a state, the config agrees in every field that the state
depends on, and the training files are the same. The run's length, logging and evaluation may change between
two starts.
Evaluation and export need the same features and model.
"""

import re
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from google.protobuf.message import Message

from recsys import protos as pb
from recsys.config import fields, registry
from recsys.config.declarations import ModelDeclaration
from recsys.data import codes
from recsys.data.schema.vocabulary import fingerprints
from recsys.data.sources.base import FileMark
from recsys.errors import ConfigError, DataError, RecsysError
from recsys.training.schedules import factor
from recsys.training.state import Inputs, SavedState

MAY_CHANGE = (
    "train.num_epochs",
    "train.num_steps",
    "train.log_every_steps",
    "train.evaluation",
    "train.checkpoint",
    "train.hooks",
    "train.sharding",
    "train.sharding_plan",
    "train.unique_ids",
    "train.rank_timeout",
    "data.validation",
    "data.test",
    "data.eval_batch_size",
    "data.num_workers",
    "data.prefetch_batches",
    "data.bad_rows",
    "data.train.parquet.paths",
    "data.train.csv.paths",
    "data.vocabulary_dir",
    "data.item_file",
    "features.id.vocabulary.file",
    "export",
    "predict",
    "imports",
)
"""Fields that a resumed run may change.

Neither the batches read so far nor the updates made so far depend on them, except through a learning-rate
schedule that ends with the run (see `changed_schedule`). Files may move: `require_same_inputs` compares their
contents.
"""

MODEL_MAY_CHANGE = (
    "features.id.vocabulary.file",
    "features.id.vocabulary.unknown_rate",
    "features.id.init_from",
    "model.precision",
)
"""Fields of `features` and `model` that evaluation and export may change for any model.

They locate files, matter only in training, or set the precision of scores. Each model declares further
fields, such as metrics.
"""

KERNELS = ("backend", "compile", "deterministic", "recompute")
"""Names of fields that evaluation and export may change in any mixer."""


def model_may_change() -> tuple[str, ...]:
    """Returns the fields that evaluation and export may change: they do not affect what weights mean."""
    paths = list(MODEL_MAY_CHANGE)
    for family in fields.alternatives(pb.Model):
        declared = registry.declaration(fields.type_of(family)) or ModelDeclaration
        paths += [f"model.{fields.name_of(family)}.{path}" for path in declared.may_change]
    return tuple(paths)


def saved_config(state: SavedState, path: Path) -> pb.Pipeline:
    """Returns the resolved config that a state was saved with.

    Raises:
        RecsysError: the config has unknown fields or cannot be parsed.
    """
    try:
        return text_format.Parse(state.config, pb.Pipeline())
    except text_format.ParseError as error:
        problem = f"its config cannot be read ({error}); was it saved by another version of recsys?"
        raise RecsysError(f"{path}: {problem}") from error


def require_same_model(state: SavedState, now: pb.Pipeline, path: Path) -> None:
    """Checks that a resolved config may use the weights of a state.

    Many changes of a config change the scores without changing any shape; nothing else would detect them.

    Args:
        state: the saved state.
        now: the resolved config that will use its weights.
        path: the state's folder, for errors.

    Raises:
        ConfigError: lists each field of `features` and `model` that differs and must not.
        DataError: lists each table whose ids differ.
        RecsysError: the state's config cannot be read.
    """
    changed = _changed(saved_config(state, path), now, str(path), _may_change_model)
    if changed:
        raise ConfigError(
            [
                f"{path} was trained with another model, so its weights would mean something else. Give the "
                "old values; without --config, --run-dir uses those of the run. These fields may change: "
                + ", ".join([*model_may_change(), *(f"{name} of a mixer" for name in KERNELS)]),
                *changed,
            ]
        )
    require_same_vocabularies(state.inputs, fingerprints(now))
    _require_same_codes(state.inputs, codes.fingerprint(now))


def require_same_config(saved: pb.Pipeline, now: pb.Pipeline, folder: str) -> None:
    """Checks that a run may resume with a resolved config.

    Raises:
        ConfigError: lists each field that differs and must not.
    """
    changed = _changed(saved, now, folder, _may_change)
    if changed:
        raise ConfigError(
            [
                f"{folder} holds a run with another config, so it is not continued. Give the old values, or "
                "another --run-dir. These fields may change: " + ", ".join(MAY_CHANGE),
                *changed,
            ]
        )


def require_same_inputs(saved: Inputs, now: Inputs) -> None:
    """Checks that training files, vocabularies, the item catalogue and semantic ids are unchanged. Files may
    have moved.

    Raises:
        DataError: lists each file that is new, missing or changed; the order of files matters.
    """
    require_same_vocabularies(saved, now.vocabularies)
    _require_same_codes(saved, now.codes)
    # A state without a fingerprint of its items was saved before fingerprints existed.
    if saved.items is not None and saved.items != now.items:
        raise DataError(
            "data.item_file changed since the run was saved, so the run would continue with other items. "
            "Restore the old file, or train again with another --run-dir"
        )
    lines = []
    for before, after in zip_longest(saved.files, now.files):
        if before is None or after is None or _content(before) != _content(after):
            lines.append(f"{_file(before)} when the run was saved, {_file(after)} now")
    if lines:
        raise DataError(
            "the training files changed, so the run's position in them is no longer valid:\n"
            + "\n".join(lines)
        )


def require_same_vocabularies(saved: Inputs, now: dict[str, str]) -> None:
    """Checks that vocabularies are those that a model was trained with.

    Args:
        saved: the inputs of a saved state.
        now: `vocabulary.fingerprints` of the config.

    Raises:
        DataError: lists each table whose ids differ.
    """
    before = saved.vocabularies
    changed = sorted(table for table in before if now.get(table) != before[table])
    if changed:
        raise DataError(
            f"the vocabulary of {', '.join(changed)} is not the one that the model was trained with, or its "
            "ids are in another order (model.embedding.placement): rows would stand for other ids. Restore "
            "it, or train again with another --run-dir"
        )


def _require_same_codes(saved: Inputs, now: str | None) -> None:
    """Raises DataError if items have other semantic ids than those that a model was trained with."""
    # A state without a fingerprint of its codes was saved before fingerprints existed.
    if saved.codes is not None and saved.codes != now:
        raise DataError(
            "the bundle gives items other codes than those that the model was trained with, so its weights "
            "would mean other items. Restore the old bundle, or train again with another --run-dir"
        )


def differences(saved: SavedState, versions: dict[str, str], world_size: int) -> list[str]:
    """Describes changes that allow a resume but may change losses in their last digits, one clause each."""
    changes = []
    if saved.world_size != world_size:
        changes.append(
            f"it was saved by {saved.world_size} processes and resumes with {world_size}; a step has one "
            "batch per process"
        )
    changed = [
        f"{name} {saved.versions.get(name, '(none)')} then, {versions.get(name, '(none)')} now"
        for name in sorted(saved.versions.keys() | versions.keys())
        if saved.versions.get(name) != versions.get(name)
    ]
    if changed:
        changes.append(
            f"it was saved with other versions ({'; '.join(changed)}); losses may differ in their last "
            "digits from those of a run that was never stopped"
        )
    return changes


def changed_schedule(schedule: pb.Schedule, step: int, before: int, now: int) -> str | None:
    """Returns a warning if the learning rate would jump because the run's length has changed, else None.

    Args:
        schedule: the resolved message.
        step: steps done.
        before, now: steps of the whole run, in the saved and in the current config.
    """
    was, becomes = factor(step, schedule, before), factor(step, schedule, now)
    if was == becomes:
        return None
    return (
        f"train.schedule: the run had {before} steps when it was saved and has {now} now, so the next step's "
        f"learning rate is {becomes:.3g} of its peak instead of {was:.3g}. A run that may grow wants constant"
    )


def _changed(
    saved: pb.Pipeline, now: pb.Pipeline, folder: str, may_change: Callable[[str], bool]
) -> list[str]:
    """Returns a line with both values for each field that differs and must not."""
    before, after = _leaves(saved), _leaves(now)
    return [
        f"{path}: {_show(before, path)} in {folder}, {_show(after, path)} now"
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path) and not may_change(_without_indices(path))
    ]


def _leaves(message: Message, prefix: str = "") -> dict[str, Any]:
    """Returns every scalar of a message by path, such as `features[0].id.table`, defaults included."""
    leaves: dict[str, Any] = {}
    for field in fields.all_of(message):
        value, path = fields.value_of(message, field), prefix + fields.name_of(field)
        if field.enum_type is not None:
            names = field.enum_type.values_by_number
            value = [names[v].name for v in value] if field.is_repeated else names[value].name
        if field.is_repeated:
            for index, item in enumerate(value):
                leaves |= _leaf(item, f"{path}[{index}]")
        elif fields.is_set(message, field) or field.has_default_value:
            leaves |= _leaf(value, path)
    return leaves


def _leaf(value: Any, path: str) -> dict[str, Any]:
    return {path: "{}"} | _leaves(value, path + ".") if isinstance(value, Message) else {path: value}


def _without_indices(path: str) -> str:
    return re.sub(r"\[\d+\]", "", path)


def _may_change(path: str) -> bool:
    return _is_below(path, MAY_CHANGE)


def _may_change_model(path: str) -> bool:
    if not _is_below(path, ("features", "model")):
        return True
    of_kernel = ".mixer." in path and path.rpartition(".")[2] in KERNELS
    return of_kernel or _is_below(path, model_may_change())


def _is_below(path: str, places: tuple[str, ...]) -> bool:
    return any(path == place or path.startswith(place + ".") for place in places)


def _show(leaves: dict[str, Any], path: str) -> str:
    return repr(leaves[path]) if path in leaves else "absent"


def _content(file: FileMark) -> tuple[int, str]:
    return file.size, file.fingerprint


def _file(file: FileMark | None) -> str:
    return f"{file.path} ({file.size:,} bytes, {file.fingerprint[:12]})" if file else "no file"
