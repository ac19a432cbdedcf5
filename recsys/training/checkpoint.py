"""Writes, finds, verifies and loads the saved states of a run.

`checkpoints/step-00001000/` holds the tensors as torch.distributed.checkpoint writes them, `state.json` with
everything that is not a tensor, and `manifest.json` with a hash of every file. A state is written to a
temporary folder, which is renamed when it is complete. A folder whose manifest is missing or does not match
is ignored, so a run that is killed while it saves falls back to the previous state. Loading a state executes
no code from its files.
"""

import json
import logging
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torchrec.distributed.types import ShardedTensor

from recsys import files, typed_json
from recsys.errors import ConfigError, RecsysError
from recsys.training.distributed import gather, on_main
from recsys.training.names import MODEL
from recsys.training.restricted_unpickler import DAMAGED_TENSORS, SafeReader, read_metadata
from recsys.training.state import Best, SavedState

STATE = "state.json"

_STATE = re.compile(r"step-[0-9]{8,15}")
"""Matches the folders of states, see `_name`."""

AVERAGE = "average."
"""Prefix of the names of averaged weights (see `averaging`); the rest is the name of the weight."""

Tensors = Mapping[str, Tensor | ShardedTensor]

log = logging.getLogger(__name__)


class Checkpoints:
    """The saved states of one run.

    `newest` and `save` are collective: all ranks must call them, and all return or raise the same.

    Args:
        folder: `run_dir/checkpoints`, on a disk that all ranks see.
        keep: number of newest undamaged states that pruning leaves, at least 2. The best state survives too.
    """

    def __init__(self, folder: Path, keep: int = 2):
        if keep < 2:
            raise ValueError(f"keep must be at least 2, got {keep}: one state may turn out damaged")
        self.folder = folder
        self.keep = keep
        self._damaged: set[Path] = set()

    def steps(self) -> list[Path]:
        """Returns the folders of all saved states, oldest first, damaged ones included. Not collective."""
        return sorted(path for path in self.folder.glob("step-*") if _STATE.fullmatch(path.name))

    def newest(self) -> Path | None:
        """Returns the newest undamaged state, or None; warns about damaged states. Collective."""
        return on_main(self.newest_here)

    def save(self, tensors: Tensors, state: SavedState) -> Path:
        """Writes a state, then removes states that need not be kept. Collective.

        Args:
            tensors: the tensors of this rank by name; a ShardedTensor is written shard by shard.
            state: everything else. Its numbers must not be NaN.

        Raises:
            RecsysError: no space is left, or the folder cannot be written. Older states are untouched.
        """
        path = self.folder / _name(state.progress.step)
        aside = self.folder / f".{path.name}.partial"
        needed = sum(gather(local_bytes(tensors)))
        on_main(lambda: _prepare(aside, needed))
        try:
            with _without_advice():
                dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(aside))
        except (CheckpointException, RuntimeError, OSError) as error:
            fault = _explain(error, aside, needed)
            on_main(lambda: shutil.rmtree(aside, ignore_errors=True))
            raise fault from error
        on_main(lambda: self._publish(aside, path, state, needed))
        return path

    def newest_here(self) -> Path | None:
        """Returns the newest undamaged state on the disk as this rank sees it, or None. Not collective."""
        for path in reversed(self.steps()):
            faults = files.manifest_faults(path)
            if not faults:
                return path
            self._damaged.add(path)
            log.warning("checkpoint %s is damaged and skipped: %s", path.name, "; ".join(faults))
        return None

    def _publish(self, aside: Path, path: Path, state: SavedState, needed: int) -> None:
        try:
            files.write_text(aside / STATE, json.dumps(state.to_json(), indent=1, allow_nan=False))
            files.write_manifest(aside)
            files.publish(aside, path)
        except OSError as error:
            fault = _explain(error, aside, needed)
            shutil.rmtree(aside, ignore_errors=True)
            raise fault from error
        self._damaged.discard(path)
        self._prune(state.progress.best)

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
        return _require_whole(path)
    if which not in ("best", "newest"):
        raise ConfigError(f"checkpoint {which!r}: give best, newest, or the number of a step")
    newest = checkpoints.newest_here()
    if newest is None:
        raise RecsysError(f"{folder}: there is no undamaged checkpoint; train first: python -m recsys.train")
    best = read_state(newest).progress.best
    return _require_whole(folder / _name(best.step)) if which == "best" and best else newest


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


def load_weights(path: Path, model: nn.Module) -> None:
    """Fills a model that is not sharded with the weights of a saved state. Not collective.

    Averaged weights, if the state has them, replace the others. Any number of ranks may have written the
    state.

    Raises:
        RecsysError: the state is damaged, or a weight is missing, unknown, or has another shape or type.
    """
    _require_whole(path)
    weights = {MODEL + name: tensor for name, tensor in model.state_dict().items()}
    _load_evaluated(path, weights, alone=True)


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
    parts: list[Tensor] = []
    for tensor in tensors.values():
        sharded = isinstance(tensor, ShardedTensor)
        parts += [shard.tensor for shard in tensor.local_shards()] if sharded else [tensor]
    return parts


def _load_evaluated(path: Path, weights: Tensors, alone: bool) -> None:
    entries = read_metadata(path).state_dict_metadata
    averaged = {MODEL + name.removeprefix(AVERAGE) for name in entries if name.startswith(AVERAGE)}
    prefixed = {n: x for n, x in entries.items() if n.startswith((MODEL, AVERAGE)) and n not in averaged}
    wanted = {
        AVERAGE + name.removeprefix(MODEL) if name in averaged else name: tensor
        for name, tensor in weights.items()
    }
    _fill(path, wanted, prefixed, alone)


def _load(path: Path, tensors: Tensors, prefix: str, alone: bool) -> None:
    stored = {n: x for n, x in read_metadata(path).state_dict_metadata.items() if n.startswith(prefix)}
    _fill(path, tensors, stored, alone)


def _fill(path: Path, tensors: Tensors, stored: Mapping[str, Any], alone: bool) -> None:
    with _without_advice():
        _require_equal(path, tensors, stored)
        try:
            dcp.load(dict(tensors), storage_reader=SafeReader(path), no_dist=alone)
        except (CheckpointException, *DAMAGED_TENSORS) as error:
            problem = _message(error).strip().splitlines()[-1][:300]
            raise RecsysError(
                f"checkpoint {path} cannot be loaded ({problem}); remove it to use an older one"
            ) from error


def _require_whole(path: Path) -> Path:
    if faults := files.manifest_faults(path):
        raise RecsysError(f"checkpoint {path} is damaged: " + "; ".join(faults))
    return path


def _name(step: int) -> str:
    return f"step-{step:08d}"


@contextmanager
def _without_advice() -> Iterator[None]:
    """Silences torch's warnings about ShardedTensor and about a single process; both are intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use DTensor", FutureWarning)
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninit", UserWarning)
        yield


def _require_equal(path: Path, wanted: Tensors, stored: Mapping[str, Any]) -> None:
    faults = [f"{name}: in the checkpoint only" for name in sorted(stored.keys() - wanted.keys())]
    faults += [f"{name}: missing in the checkpoint" for name in sorted(wanted.keys() - stored.keys())]
    for name in sorted(wanted.keys() & stored.keys()):
        wanted_kind = (tuple(wanted[name].size()), wanted[name].dtype)
        stored_kind = (tuple(stored[name].size), stored[name].properties.dtype)
        if wanted_kind != stored_kind:
            faults.append(
                f"{name}: {_describe(*stored_kind)} in the checkpoint, {_describe(*wanted_kind)} in this run"
            )
    if faults:
        raise RecsysError(f"checkpoint {path} does not fit this model:\n" + "\n".join(faults))


def _describe(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


def _prepare(aside: Path, needed: int) -> None:
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    free = shutil.disk_usage(aside).free
    if free < needed:
        aside.rmdir()
        raise _no_space(aside.parent, needed, free)


def _explain(error: Exception, path: Path, needed: int) -> RecsysError:
    """Explains an error of the checkpoint writer, which reports a full disk as a failed archive seek."""
    free = shutil.disk_usage(path.parent).free
    written = sum(x.stat().st_size for x in path.glob("*")) if path.is_dir() else 0
    if "No space left" in str(error) or free < max(needed - written, 1 << 20):
        return _no_space(path.parent, needed, free)
    return RecsysError(f"{path}: the checkpoint could not be written: {_message(error)}")


def _message(error: Exception) -> str:
    """Returns the message of an error. For an error on several ranks, joins their messages without stacks."""
    failures = error.failures.values() if isinstance(error, CheckpointException) else ()
    return "; ".join(dict.fromkeys(str(failure) for failure, _ in failures)) or str(error)


def _no_space(folder: Path, needed: int, free: int) -> RecsysError:
    return RecsysError(
        f"no space left on {folder}: the checkpoint's tensors have {needed:,} bytes, {free:,} are "
        "free. Make room and start the same command again: it continues from the last checkpoint."
    )
