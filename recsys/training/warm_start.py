"""Starts a new run with the weights of an earlier one, as `train.init_from` asks.

Parameters are matched by name. Rows of an embedding table whose vocabulary has changed are copied by id. What
was taken and what was not is logged and written to `init_from.json` in the run folder. Buffers are constants
of the new model and never taken.
"""

import json
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from torchrec.distributed.types import ShardedTensor

from recsys import files
from recsys import protos as pb
from recsys.data.schema.carry_over import CarryOver
from recsys.data.schema.vocabulary import Vocabulary, embedded_features, fingerprints, mapping_of
from recsys.errors import ConfigError, DataError
from recsys.modules.embedding import table_of
from recsys.training import checkpoint, run_vocabularies
from recsys.training.checkpoint import AVERAGE, CHECKPOINTS, Tensors
from recsys.training.names import MODEL, fits, without_match
from recsys.training.restricted_unpickler import read_metadata
from recsys.training.resume import saved_config
from recsys.training.row_copies import copy_rows
from recsys.training.state import SavedState

FILE = "init_from.json"
OPTIMIZER = "optimizer."
"""Prefix of the names of optimizer states in a checkpoint; the name of the parameter follows."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CarriedRows:
    """Rows of a table that were copied by id, without the row of unknown ids.

    Attributes:
        carried: rows that took the row of the same id.
        initial: rows that keep their initial values, because their id is new.
        before: rows of the earlier table.
    """

    carried: int
    initial: int
    before: int

    @classmethod
    def of(cls, change: CarryOver, copied: int) -> "CarriedRows":
        """Counts after `copied` rows of a table were copied."""
        carried = copied - change.continues_unknown
        now, before = (
            mapping.rows - isinstance(mapping, Vocabulary) for mapping in (change.now, change.before)
        )
        return cls(carried, now - carried, before)


@dataclass(frozen=True)
class Report:
    """Result of a warm start; names are those of `Model.named_parameters()`.

    Attributes:
        checkpoint: folder of the state.
        loaded: parameters that were taken, and optimizer states, with the prefix `optimizer.`.
        excluded: parameters that `include` and `exclude` leave out.
        missing: parameters and states that the checkpoint does not have; they keep their initial values.
        unused: tensors of the checkpoint that the model does not have.
        tables: rows of each table whose vocabulary has changed.
        batches: batches that the optimizer states have seen; 0 if none were taken.
    """

    checkpoint: str
    loaded: list[str]
    excluded: list[str]
    missing: list[str]
    unused: list[str]
    tables: dict[str, CarriedRows]
    batches: int = 0

    def lines(self) -> list[str]:
        """Describes the report for the log."""
        parameters = [name for name in self.loaded if not name.startswith(OPTIMIZER)]
        states = len(self.loaded) - len(parameters)
        more = f", {states} states of optimizers" if states else ""
        lines = [f"starting with weights of {self.checkpoint}: {len(parameters)} parameters taken{more}"]
        for meaning, names in (
            ("excluded", self.excluded),
            ("not in the checkpoint, so they keep their initial values", self.missing),
            ("in the checkpoint but not in the model", self.unused),
        ):
            lines += [f"{meaning}: {len(names)}: {', '.join(names)}"] if names else []
        for table, rows in self.tables.items():
            carried = f"{rows.carried:,} of {rows.before:,} rows carried over by id"
            lines.append(f"table {table}: {carried}, {rows.initial:,} rows are new")
        return lines


def find_state(config: pb.InitFrom) -> Path:
    """Returns the folder of the state that `train.init_from` names. Not collective.

    Raises:
        ConfigError: there is no such run or checkpoint.
        RecsysError: the checkpoint is damaged, or its step was not kept.
    """
    path = Path(config.path)
    if (path / checkpoint.STATE).is_file():
        if config.HasField("checkpoint"):
            problem = f"{path} is a checkpoint already; leave it out, or give the run folder in path"
            raise ConfigError(f"train.init_from.checkpoint: {problem}")
        return checkpoint.require_whole(path)
    if not (path / CHECKPOINTS).is_dir():
        problem = f"{path} is neither the folder of a run nor of a checkpoint"
        raise ConfigError(f"train.init_from.path: {problem}; relative paths count from {Path.cwd()}")
    return checkpoint.find(path / CHECKPOINTS, config.checkpoint or "newest")


def load(
    pipeline: pb.Pipeline,
    path: Path,
    weights: Tensors,
    constants: Collection[str],
    states: Tensors | None = None,
    *,
    alone: bool = False,
) -> Report:
    """Fills the tensors of a new run from a saved state. Collective unless `alone`.

    Args:
        pipeline: the resolved config of the new run; it has `train.init_from`.
        path: from `find_state`.
        weights: of this rank, with names that begin with `MODEL`.
        constants: names among `weights` that belong to buffers.
        states: optimizer states, with names that begin with `OPTIMIZER`.
        alone: there is no process group, and no tensor is sharded.

    Raises:
        ConfigError: a pattern matches no parameter, a shape or the meaning of a table's rows differs, or no
            parameter is left to take.
        DataError: a vocabulary of the earlier run is gone.
    """
    states = states or {}
    state = checkpoint.read_state(path)
    earlier = saved_config(state, path)
    stored = dict(read_metadata(path).state_dict_metadata)
    names = _Names.compare(pipeline.train.init_from, weights.keys() - constants, stored, constants)
    targets = [_Target(name, names.stored[name], weights[MODEL + name]) for name in names.loaded]
    taken = {name: names.stored[name] for name in names.loaded if pipeline.train.init_from.optimizer}
    states_to_take = _states(taken, states)
    targets += [_Target(n, entry, states[n]) for n, entry in states_to_take.items() if entry in stored]
    changes, findings = _changed_tables(pipeline, earlier, state, path, targets)
    findings += names.findings + _mismatches(targets, stored, changes)
    if not names.loaded and not findings:
        findings = [f"train.init_from: {path} has none of the parameters to take"]
    if findings:
        raise ConfigError(findings)
    takes_states = len(targets) > len(names.loaded)
    return Report(
        checkpoint=str(path),
        loaded=[target.name for target in targets],
        excluded=names.excluded,
        missing=names.missing + [n for n, entry in states_to_take.items() if entry not in stored],
        unused=names.unused,
        tables=_fill(path, targets, changes, alone),
        batches=_batches(state, earlier) if takes_states else 0,
    )


def write(report: Report, folder: Path) -> None:
    """Writes the report into a run folder."""
    files.write_text(folder / FILE, json.dumps(asdict(report), indent=1))


@dataclass(frozen=True)
class _Names:
    """Names of parameters, without `MODEL`, sorted by what happens to them; see `Report`.

    Attributes:
        stored: name in the checkpoint by name in the model; it may begin with `AVERAGE`.
        findings: patterns that match nothing.
    """

    loaded: list[str]
    excluded: list[str]
    missing: list[str]
    unused: list[str]
    stored: dict[str, str]
    findings: list[str]

    @classmethod
    def compare(
        cls, config: pb.InitFrom, weights: Iterable[str], entries: Iterable[str], constants: Collection[str]
    ) -> "_Names":
        stored = {n.removeprefix(MODEL): n for n in entries if n.startswith(MODEL) and n not in constants}
        if not config.optimizer:
            stored |= {n.removeprefix(AVERAGE): n for n in entries if n.startswith(AVERAGE)}
        here = {name.removeprefix(MODEL) for name in weights}
        # The name of a table's weight also says how wide the table is and where it is.
        by_table = {table_of(name): name for name in here if table_of(name) is not None}
        stored = {by_table.get(table_of(name), name): entry for name, entry in stored.items()}
        names = sorted(here | stored.keys())
        chosen = {
            name
            for name in names
            if (not config.include or fits(name, config.include)) and not fits(name, config.exclude)
        }
        return cls(
            loaded=[name for name in names if name in chosen and name in here and name in stored],
            excluded=[name for name in names if name in here and name not in chosen],
            missing=[name for name in names if name in chosen and name not in stored],
            unused=[name for name in names if name in chosen and name not in here],
            stored=stored,
            findings=without_match(config.include, names, "train.init_from.include")
            + without_match(config.exclude, names, "train.init_from.exclude"),
        )


class _Target(NamedTuple):
    """A tensor of the new run, the name it is reported by, and its name in the checkpoint."""

    name: str
    stored: str
    tensor: Tensor | ShardedTensor

    @property
    def table(self) -> str | None:
        """The embedding table that the tensor belongs to, as its weight or as a state of its optimizer."""
        name = self.name.removeprefix(OPTIMIZER).removeprefix(MODEL)
        weight, is_state, _ = name.partition(".weight.")
        return table_of(f"{weight}.weight" if is_state else name)


def _states(parameters: Mapping[str, str], states: Tensors) -> dict[str, str]:
    """Returns the name in the checkpoint of each optimizer state of some parameters, by its name here.

    Args:
        parameters: by name of a parameter, its name in the checkpoint.
        states: all optimizer states.
    """
    return {
        state: state.replace(f"{MODEL}{name}.", f"{stored}.", 1)
        for name, stored in parameters.items()
        for state in states
        if state.startswith(f"{OPTIMIZER}{MODEL}{name}.")
    }


def _changed_tables(
    pipeline: pb.Pipeline, earlier: pb.Pipeline, state: SavedState, path: Path, targets: list[_Target]
) -> "tuple[dict[str, CarryOver], list[str]]":
    """Returns how to find the rows of each table in `targets` whose rows mean other ids than before, and a
    finding for each table whose rows cannot be found."""
    now, before = embedded_features(pipeline), embedded_features(earlier)
    digests = fingerprints(pipeline)
    folder = path.absolute().parent.parent
    changes: dict[str, CarryOver] = {}
    findings: list[str] = []
    for table in sorted({target.table for target in targets} - {None} & now.keys() & before.keys()):
        meaning = before[table].meaning(state.inputs.vocabularies.get(table))
        if meaning == now[table].meaning(digests.get(table)):
            continue
        try:
            file = None
            if before[table].vocabulary is not None:
                digest = state.inputs.vocabularies[table]
                file = run_vocabularies.find(table, before[table], digest, folder)
            mappings = (
                mapping_of(earlier, before[table], file),
                mapping_of(pipeline, now[table]),
            )
            changes[table] = CarryOver(table, *mappings)
        except DataError as error:
            findings.append(f'train.init_from: {error}. To leave it out: exclude: "*.{table}_table.weight"')
    return changes, findings


def _mismatches(
    targets: list[_Target], stored: Mapping[str, Any], changes: Mapping[str, CarryOver]
) -> list[str]:
    """Returns a finding for each tensor whose sizes differ, other than the number of rows found by id."""
    findings = []
    for target in targets:
        here, there = list(target.tensor.size()), list(stored[target.stored].size)
        first = 1 if target.table in changes else 0
        if here[first:] != there[first:]:
            findings.append(_mismatch(target.name, there, here))
    return findings


def _mismatch(name: str, there: list[int], here: list[int]) -> str:
    pattern = name.removeprefix(OPTIMIZER).removeprefix(MODEL)
    problem = f"{name}: {there} in the checkpoint, {here} in this model"
    return f'train.init_from: {problem}. Make them equal, or leave it out with exclude: "{pattern}"'


def _fill(
    path: Path, targets: list[_Target], changes: Mapping[str, CarryOver], alone: bool
) -> dict[str, CarriedRows]:
    by_row = [target for target in targets if target.table in changes and len(target.tensor.size())]
    whole = {target.stored: target.tensor for target in targets if target not in by_row}
    checkpoint.fill(path, whole, alone=alone)
    tables = {}
    for target in by_row:
        change = changes[target.table or ""]
        copied = copy_rows(path, target.stored, target.tensor, change.sources)
        if not target.name.startswith(OPTIMIZER):
            tables[change.table] = CarriedRows.of(change, copied)
    return tables


def _batches(state: SavedState, earlier: pb.Pipeline) -> int:
    progress = state.progress
    return progress.earlier_batches + progress.step * earlier.train.accumulate_batches
