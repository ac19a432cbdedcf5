"""Copies states to an address such as `s3://bucket/runs/x`, and back into an empty run folder.

A store of objects renames nothing at once, so a copy counts only when its manifest is there, which is sent
last and compared with the files after they were fetched.
"""

import logging
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

import torch.distributed as dist

from recsys import files
from recsys.data.filesystems import open_filesystem
from recsys.errors import RecsysError
from recsys.training.distributed import gather, on_main

log = logging.getLogger(__name__)


class RemoteCopies:
    """The copies of a run's states at one address.

    Args:
        address: of any file system that fsspec knows; of this run alone.

    Raises:
        DataError: the protocol is unknown.
        InstallationError: a package that it needs is not installed.

    Attributes:
        fault: why the newest state was not copied, the same on every rank; "" if it was.
    """

    def __init__(self, address: str) -> None:
        self._address = address.rstrip("/")
        self._filesystem, root = open_filesystem(self._address)
        self._root = str(root).rstrip("/")
        self.fault = ""

    def send(self, path: Path, kept: Collection[str], group: dist.ProcessGroup | None) -> None:
        """Copies a state, each rank its own files, and removes old copies. Collective.

        A failure is logged and remembered in `fault`: training does not depend on the address.

        Args:
            path: the folder of the state, undamaged.
            kept: names of the states whose copies stay.
            group: as in `distributed.gather`.
        """
        rank = dist.get_rank() if group else 0
        names = [x.name for x in path.iterdir() if x.name.startswith(f"__{rank}_")]
        if rank == 0:
            names += [x.name for x in path.iterdir() if not x.name.startswith("__")]
        sent = gather(_fault(lambda: self._send(path, set(names) - {files.MANIFEST})), group)
        self.fault = next((fault for fault in sent if fault), "")
        if not self.fault:
            self.fault = on_main(lambda: _fault(lambda: self._finish(path, kept)), group)
        if self.fault:
            self.fault = f"{path.name} was not copied to {self._address}: {self.fault}"
            log.warning("%s", self.fault)

    def fetch(self, folder: Path, accept: Callable[[Path], list[str]]) -> None:
        """Fetches the newest complete copy into a folder of states, and the best state if it names one.

        Args:
            folder: `run_dir/checkpoints`, without states.
            accept: takes a fetched state and returns the names of further states to fetch.

        Raises:
            RecsysError: the address cannot be read.
        """
        if fault := _fault(lambda: self._fetch(folder, accept)):
            raise RecsysError(f"train.checkpoint.copy_to: {self._address} cannot be read: {fault}")

    def _send(self, path: Path, names: Collection[str]) -> None:
        target = f"{self._root}/{path.name}"
        self._filesystem.makedirs(target, exist_ok=True)
        for name in sorted(names):
            self._filesystem.put_file(str(path / name), f"{target}/{name}")

    def _finish(self, path: Path, kept: Collection[str]) -> None:
        self._send(path, [files.MANIFEST])
        for name in set(self._complete()) - {*kept, path.name}:
            self._filesystem.rm_file(f"{self._root}/{name}/{files.MANIFEST}")
            self._filesystem.rm(f"{self._root}/{name}", recursive=True)

    def _complete(self) -> list[str]:
        """Returns the names of the states with a manifest, newest first."""
        self._filesystem.invalidate_cache()
        paths = self._filesystem.glob(f"{self._root}/step-*/{files.MANIFEST}")
        return sorted((str(path).split("/")[-2] for path in paths), reverse=True)

    def _fetch(self, folder: Path, accept: Callable[[Path], list[str]]) -> None:
        for name in self._complete():
            if self._fetch_state(folder, name):
                log.info("fetched %s/%s", self._address, name)
                for more in accept(folder / name):
                    if not (folder / more).exists() and not self._fetch_state(folder, more):
                        log.warning("%s/%s is named by %s, but is not whole", self._address, more, name)
                return

    def _fetch_state(self, folder: Path, name: str) -> bool:
        """Fetches one state and returns whether it is whole; nothing stays of one that is not."""
        aside = folder / f".{name}.partial"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        source = f"{self._root}/{name}"
        if self._filesystem.isdir(source):
            for path in self._filesystem.ls(source, detail=False):
                self._filesystem.get_file(path, str(aside / str(path).split("/")[-1]))
        if faults := files.manifest_faults(aside):
            log.warning("the copy %s/%s is damaged and skipped: %s", self._address, name, "; ".join(faults))
            shutil.rmtree(aside)
            return False
        files.publish(aside, folder / name)
        return True


def _fault(function: Callable[[], None]) -> str:
    """Calls a function and returns the reason why it failed, or ""."""
    try:
        function()
    except Exception as error:  # noqa: BLE001  clients of storage services raise errors of their own
        return f"{type(error).__name__}: {error}"
    return ""
