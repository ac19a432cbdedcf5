"""Writes, finds, verifies and loads the saved states of a run.

`checkpoints/step-00001000/` holds the tensors as torch.distributed.checkpoint writes them, `state.json` with
everything that is not a tensor, and `manifest.json` with a hash of every file. A state is written to a
temporary folder, which is renamed when it is complete; `checkpoint_writer` does this while the run trains. A
folder whose manifest is missing or does not match
is ignored, so a run that is killed while it saves falls back to the previous state. Loading a state executes
no code from its files.
"""

import json
import logging
import re
from collections.abc import Collection, Mapping
from concurrent import futures
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torchrec.distributed.types import ShardedTensor

from recsys import files, typed_json
from recsys.errors import ConfigError, RecsysError
from recsys.modules.embedding import table_of
from recsys.training import host_copies
from recsys.training.background import in_background
from recsys.training.checkpoint_writer import STATE, StateWriter, message_of
from recsys.training.distributed import gather, on_main
from recsys.training.host_copies import HostCopies
from recsys.training.memory import free_memory
from recsys.training.names import MODEL
from recsys.training.remote_copies import RemoteCopies
from recsys.training.restricted_unpickler import DAMAGED_TENSORS, SafeReader, read_metadata
from recsys.training.state import Best, SavedState

CHECKPOINTS = "checkpoints"
"""Name of the folder of a run's states, in the run folder."""

_STATE = re.compile(r"step-[0-9]{8,15}")
"""Matches the folders of states, see `_name`."""

AVERAGE = "average."
"""Prefix of the names of averaged weights (see `averaging`); the rest is the name of the weight."""

_FREE_SHARE = 0.9
"""Share of the host's free memory that copies of a state may take."""

_SLOWEST_RANK = timedelta(minutes=30)
"""Time that ranks wait for the one that takes longest to write, check or fetch files."""

Tensors = Mapping[str, Tensor | ShardedTensor]

log = logging.getLogger(__name__)


class Checkpoints:
    """The saved states of one run.

    `newest`, `save` and `begin` are collective: all ranks must call them, and all return or raise the same.
    At most one state is being written at a time.

    Args:
        folder: `run_dir/checkpoints`, on a disk that all ranks see.
        keep: number of newest undamaged states that pruning leaves, at least 2. The best state survives too.
        copy_to: address to which states are copied; "" for none.
    """

    def __init__(self, folder: Path, keep: int = 2, copy_to: str = ""):
        if keep < 2:
            raise ValueError(f"keep must be at least 2, got {keep}: one state may turn out damaged")
        self.folder = folder
        self.keep = keep
        self._damaged: set[Path] = set()
        self._copies: HostCopies | None = HostCopies()
        self._remote = RemoteCopies(copy_to) if copy_to else None
        self._writing: Future[Path] | None = None
        self._group: dist.ProcessGroup | None = None

    def steps(self) -> list[Path]:
        """Returns the folders of all saved states, oldest first, damaged ones included. Not collective."""
        return sorted(path for path in self.folder.glob("step-*") if _STATE.fullmatch(path.name))

    def newest(self) -> Path | None:
        """Returns the newest undamaged state, or None; warns about damaged states. Collective.

        If the folder has no states at all, copies are fetched first.

        Raises:
            RecsysError: the address of the copies cannot be read.
        """
        remote = self._remote
        if remote is not None:
            on_main(lambda: None if self.steps() else remote.fetch(self.folder, _best_name), self.group())
        return on_main(self.newest_here, self.group())

    def save(self, tensors: Tensors, state: SavedState) -> Path:
        """Writes a state and returns its folder: `begin`, then `wait`. Collective."""
        self.begin(tensors, state)
        path = self.wait()
        if path is None:
            raise ValueError("nothing was being written")
        return path

    def prepare(self, tensors: Tensors) -> None:
        """Lets a thread allocate the host memory of copies, so that the first one takes no longer.

        If the host has too little memory, this rank writes without copies, and training stands still until a
        state is written.
        """
        if self._copies is None:
            return
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        needed, free = local_bytes(tensors), free_memory(torch.device("cpu"), ranks)
        if needed > _FREE_SHARE * free:
            log.warning(
                "a copy of the state needs %.1f GiB of host memory and %.1f are free: training stands still "
                "while a state is written",
                needed / 2**30,
                free / 2**30,
            )
            self._copies = None
            return
        self._copies.prepare(dict(tensors))

    def begin(self, tensors: Tensors, state: SavedState) -> None:
        """Copies a state to host memory; a thread writes it and then removes states that need not be kept.

        Afterwards, the tensors and `state` may change. If there is no memory for copies, see `prepare`, the
        state has been written by then. A state that is still being written is waited for.
        Collective.

        Args:
            tensors: the tensors of this rank by name; a ShardedTensor is written shard by shard.
            state: everything else. Its numbers must not be NaN.

        Raises:
            RecsysError: the state before could not be written. Older ones are untouched.
        """
        self.wait()
        best = state.progress.best
        writer = StateWriter(
            path=self.folder / _name(state.progress.step),
            state=json.dumps(state.to_json(), indent=1, allow_nan=False),
            needed=sum(gather(local_bytes(tensors))),
            group=self.group(),
        )
        if self._copies is None:
            copies = {name: host_copies.in_blocks(tensor) for name, tensor in tensors.items()}
        else:
            copies = self._copies.take(dict(tensors))

        def write() -> Path:
            path = writer.write(copies)
            on_main(lambda: self._written(path, best), writer.group)
            if self._remote is not None:
                self._remote.send(path, [x.name for x in self.steps()], writer.group)
            return path

        self._writing = in_background(write, "checkpoint")
        if self._copies is None:
            futures.wait([self._writing])

    def wait(self) -> Path | None:
        """Waits for the state that is being written and returns its folder; None if there is none.

        Raises:
            RecsysError: no space is left, or the folder cannot be written. Older states are untouched.
        """
        writing, self._writing = self._writing, None
        return None if writing is None else writing.result()

    def require_copied(self) -> None:
        """Checks that the newest state has been copied, if copies were asked for. Call it after `wait`.

        Raises:
            RecsysError: it has not; the same on every rank.
        """
        if self._remote is not None and self._remote.fault:
            raise RecsysError(f"{self._remote.fault}. The state itself is in {self.folder}")

    def written(self) -> Path | None:
        """Returns the folder of a state that has been written since `begin`, once; None if there is none.

        On failure it returns None; `wait` then raises the error.
        """
        return self.wait() if self._writing is not None and self._writing.done() and not self.failed else None

    @property
    def failed(self) -> bool:
        """Whether the state that was being written could not be written, on this rank."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None

    def group(self) -> dist.ProcessGroup | None:
        """Returns a group for states alone, since a thread must not use the one that training uses, and waits
        longer; None in a single process. Collective at first."""
        if self._group is None and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=_SLOWEST_RANK)
        return self._group

    def newest_here(self) -> Path | None:
        """Returns the newest undamaged state on the disk as this rank sees it, or None. Not collective."""
        for path in reversed(self.steps()):
            faults = files.manifest_faults(path)
            if not faults:
                return path
            self._damaged.add(path)
            log.warning("checkpoint %s is damaged and skipped: %s", path.name, "; ".join(faults))
        return None

    def _written(self, path: Path, best: Best | None) -> None:
        self._damaged.discard(path)
        self._prune(best)

    def _prune(self, best: Best | None) -> None:
        """Removes old states and the remains of interrupted saves.

        Each state is renamed first, so that a folder named like a state is never half removed.
        """
        undamaged = [x for x in self.steps() if x not in self._damaged]
        kept = {*undamaged[-self.keep :], *(x for x in undamaged if best and x.name == _name(best.step))}
        for path in set(self.steps()) - kept:
            path.rename(path.with_name(f".{path.name}.old"))
        for path in self.folder.glob(".step-*"):
            files.remove(path)


def _best_name(path: Path) -> list[str]:
    best = read_state(path).progress.best
    return [] if best is None else [_name(best.step)]


def read_state(path: Path) -> SavedState:
    """Reads the part of a state that is not a tensor, as `Checkpoints.save` wrote it.

    Raises:
        RecsysError: the file cannot be read, or is not what this version writes.
    """
    try:
        return typed_json.parse((path / STATE).read_bytes(), SavedState)
    except (OSError, ValueError) as error:
        raise RecsysError(f"{path / STATE}: cannot be read ({error})") from error
    except TypeError as error:
        problem = f"an unexpected or missing part ({error})"
        raise RecsysError(f"{path / STATE}: {problem}; was it saved by another version of recsys?") from error


def find(folder: Path, which: str) -> Path:
    """Returns the folder of an undamaged state. Not collective.

    Args:
        folder: `run_dir/checkpoints`.
        which: "best", "newest", or the number of a step. The newest state names the best one; if nothing has
            been evaluated, "best" is the newest.

    Raises:
        RecsysError: there is no such state, or it is damaged.
        ConfigError: `which` is none of the three.
    """
    checkpoints = Checkpoints(folder)
    if re.fullmatch("[0-9]{1,15}", which):
        path = folder / _name(int(which))
        if not path.exists():
            kept = ", ".join(str(int(x.name.removeprefix("step-"))) for x in checkpoints.steps())
            raise RecsysError(
                f"{path}: there is no such state; the steps that were kept are {kept or '(none)'}"
            )
        return require_whole(path)
    if which not in ("best", "newest"):
        raise ConfigError(f"checkpoint {which!r}: give best, newest, or the number of a step")
    newest = checkpoints.newest_here()
    if newest is None:
        raise RecsysError(f"{folder}: there is no undamaged checkpoint; train first: python -m recsys.train")
    best = read_state(newest).progress.best
    return require_whole(folder / _name(best.step)) if which == "best" and best else newest


def load(path: Path, tensors: Tensors, prefix: str = "") -> None:
    """Fills tensors in place from a saved state; its tables may have been sharded differently. Collective.

    Args:
        path: the folder of the state.
        tensors: the tensors of this rank by name.
        prefix: load only names that begin with this, such as `MODEL`; by default, all names.

    Raises:
        RecsysError: a name is missing from the state or from `tensors`, or a shape or type differs.
    """
    _load(path, tensors, prefix, alone=False)


def load_weights(path: Path, model: nn.Module, outside: Collection[str] = ()) -> None:
    """Fills a model that is not sharded with the weights of a saved state. Not collective.

    Averaged weights, if the state has them, replace the others. Any number of ranks may have written the
    state.

    Args:
        path: the folder of the state.
        model: the model.
        outside: embedding tables that are not part of the model; see `stored_table` to read them.

    Raises:
        RecsysError: the state is damaged, or a weight is missing, unknown, or has another shape or type.
    """
    require_whole(path)
    weights = {MODEL + name: tensor for name, tensor in model.state_dict().items()}
    _load_evaluated(path, weights, alone=True, outside=outside)


def load_evaluated(path: Path, weights: Tensors) -> None:
    """Fills a model with the weights for evaluation and export: averages if there are any. Collective.

    Args:
        path: the folder of the state.
        weights: the weights of this rank, with names that begin with `MODEL`.

    Raises:
        RecsysError: a name is missing from the state or from `weights`, or a shape or type differs.
    """
    _load_evaluated(path, weights, alone=False)


def local_bytes(tensors: Tensors) -> int:
    """Returns the number of bytes of the tensors and shards on this rank."""
    return sum(part.numel() * part.element_size() for part in local_parts(tensors))


def local_parts(tensors: Tensors) -> list[Tensor]:
    """Returns the tensors on this rank: plain tensors, and this rank's shards of sharded tensors."""
    return [part for tensor in tensors.values() for part in host_copies.local_parts(tensor)]


def _load_evaluated(path: Path, weights: Tensors, alone: bool, outside: Collection[str] = ()) -> None:
    stored = read_metadata(path).state_dict_metadata
    entries = {name: entry for name, entry in stored.items() if table_of(name) not in outside}
    averaged = {MODEL + name.removeprefix(AVERAGE) for name in entries if name.startswith(AVERAGE)}
    prefixed = {n: x for n, x in entries.items() if n.startswith((MODEL, AVERAGE)) and n not in averaged}
    wanted = {
        AVERAGE + name.removeprefix(MODEL) if name in averaged else name: tensor
        for name, tensor in weights.items()
    }
    _require_equal(path, wanted, prefixed)
    fill(path, wanted, alone=alone)


def _load(path: Path, tensors: Tensors, prefix: str, alone: bool) -> None:
    stored = {n: x for n, x in read_metadata(path).state_dict_metadata.items() if n.startswith(prefix)}
    _require_equal(path, tensors, stored)
    fill(path, tensors, alone=alone)


def fill(path: Path, tensors: Tensors, *, alone: bool = False) -> None:
    """Fills tensors in place with those of the same name and size in a state. Collective unless `alone`.

    Raises:
        RecsysError: the tensors cannot be read.
    """
    try:
        dcp.load(dict(tensors), storage_reader=SafeReader(path), no_dist=alone)
    except (CheckpointException, *DAMAGED_TENSORS) as error:
        problem = message_of(error).strip().splitlines()[-1][:300]
        raise RecsysError(
            f"checkpoint {path} cannot be loaded ({problem}); remove it to use an older one"
        ) from error


def require_whole(path: Path) -> Path:
    """Returns the folder of a state if it is undamaged.

    Raises:
        RecsysError: a file is missing or differs from the manifest.
    """
    if faults := files.manifest_faults(path):
        raise RecsysError(f"checkpoint {path} is damaged: " + "; ".join(faults))
    return path


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _require_equal(path: Path, wanted: Tensors, stored: Mapping[str, Any]) -> None:
    if faults := _differences(wanted, stored):
        raise RecsysError(f"checkpoint {path} does not fit this model:\n" + "\n".join(faults))


def _differences(wanted: Tensors, stored: Mapping[str, Any]) -> list[str]:
    faults = [f"{name}: in the checkpoint only" for name in sorted(stored.keys() - wanted.keys())]
    faults += [f"{name}: missing in the checkpoint" for name in sorted(wanted.keys() - stored.keys())]
    for name in sorted(wanted.keys() & stored.keys()):
        wanted_kind = (tuple(wanted[name].size()), wanted[name].dtype)
        stored_kind = (tuple(stored[name].size), stored[name].properties.dtype)
        if wanted_kind != stored_kind:
            faults.append(
                f"{name}: {_describe(*stored_kind)} in the checkpoint, {_describe(*wanted_kind)} in this run"
            )
    return faults


def _describe(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"
