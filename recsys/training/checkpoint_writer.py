"""Writes one state of a run into a new folder, which exists under its name only when it is complete.

All ranks write and hash their own tensors. Rank 0 then adds `state.json` and the manifest, and renames the
folder. Nothing here touches the tensors of the run, so a thread can do it while the run trains.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torchrec.distributed.types import ShardedTensor

from recsys import files
from recsys.errors import RecsysError
from recsys.training.distributed import agree, on_main

STATE = "state.json"


@dataclass(frozen=True)
class StateWriter:
    """Writes one state.

    Attributes:
        path: folder of the finished state.
        state: content of `state.json`.
        needed: bytes of all ranks' tensors.
        group: a process group for nothing else; None in a run of one process.
    """

    path: Path
    state: str
    needed: int
    group: dist.ProcessGroup | None

    def write(self, tensors: Mapping[str, Tensor | ShardedTensor]) -> Path:
        """Writes the state and returns its folder. Collective.

        Raises:
            RecsysError: no space is left, or the folder cannot be written; the same on every rank.
        """
        aside = self.path.with_name(f".{self.path.name}.partial")
        on_main(lambda: _prepare(aside, self.needed), self.group)
        try:
            # With copies ahead, the writer would use the GPU, which may be recording a graph.
            writer = dcp.FileSystemWriter(aside, per_thread_copy_ahead=0)
            dcp.save(dict(tensors), storage_writer=writer, process_group=self.group, no_dist=not self.group)
        except (CheckpointException, RuntimeError, OSError) as error:
            fault = _explain(error, aside, self.needed)
            on_main(lambda: shutil.rmtree(aside, ignore_errors=True), self.group)
            raise fault from error
        rank = dist.get_rank() if self.group else 0
        hashed = agree(lambda: files.listed(aside, f"__{rank}_*.distcp"), self.group)
        together = {name: entry for files_of_rank in hashed for name, entry in files_of_rank.items()}
        on_main(lambda: self._publish(aside, together), self.group)
        return self.path

    def _publish(self, aside: Path, hashed: Mapping[str, files.ListedFile]) -> None:
        try:
            files.write_text(aside / STATE, self.state)
            files.write_manifest(aside, hashed)
            files.publish(aside, self.path)
        except OSError as error:
            fault = _explain(error, aside, self.needed)
            shutil.rmtree(aside, ignore_errors=True)
            raise fault from error


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
    return RecsysError(f"{path}: the checkpoint could not be written: {message_of(error)}")


def message_of(error: Exception) -> str:
    """Returns the message of an error. For an error on several ranks, joins their messages without stacks."""
    failures = error.failures.values() if isinstance(error, CheckpointException) else ()
    return "; ".join(dict.fromkeys(str(failure) for failure, _ in failures)) or str(error)


def _no_space(folder: Path, needed: int, free: int) -> RecsysError:
    return RecsysError(
        f"no space left on {folder}: the checkpoint's tensors have {needed:,} bytes, {free:,} are "
        "free. Make room and start the same command again: it continues from the last checkpoint."
    )
