"""Writes folders atomically, with manifests that prove them complete and a lock for the writing process.

Checkpoints, packages and predictions are written beside their final path, hashed, synced and renamed. A
reader never finds an incomplete one, even after a crash.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from recsys import typed_json
from recsys.errors import RecsysError

MANIFEST, SIGNATURE = "manifest.json", "manifest.sig"


def sha256(file: Path | BinaryIO) -> str:
    """Returns the SHA-256, in hex, of the bytes of a file, or of the rest of an open file."""
    if isinstance(file, Path):
        with file.open("rb") as opened:
            return sha256(opened)
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Waits until the bytes of a file, or the entries of a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Writes a small file atomically: a reader sees the old or the new text, never a part of it."""
    aside = path.with_name(f".{path.name}.partial")
    try:
        aside.write_text(text, encoding="utf-8")
        publish(aside, path)
    except OSError:
        # The disk may be full, or a folder may have this path; leave nothing half-written.
        with suppress(OSError):
            aside.unlink()
        raise


def remove(path: Path) -> None:
    """Removes a file, a symbolic link, or a folder with its contents."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(str(path))
    else:
        path.unlink()


def publish(aside: Path, path: Path) -> None:
    """Renames a finished file or folder to its final path, durably; an existing folder is replaced."""
    for entry in sorted(aside.rglob("*")) if aside.is_dir() else []:
        sync(entry)
    sync(aside)
    if aside.is_dir() and path.exists():
        old = path.with_name(f".{path.name}.old")
        if old.exists():
            remove(old)
        path.rename(old)
        aside.rename(path)
        remove(old)
    else:
        aside.replace(path)
    sync(path.parent)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yields a folder to fill beside `path`; it is renamed to `path` if the block succeeds, else removed.

    Raises:
        RecsysError: another running process is filling that folder.
    """
    aside = path.with_name(f".{path.name}.partial")
    aside.mkdir(parents=True, exist_ok=True)
    with _own_folder(aside) as is_ours:
        if not is_ours:
            raise RecsysError(
                f"{path}: another process is writing this folder; wait for it, or name another folder"
            )
        try:
            yield aside
            publish(aside, path)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _own_folder(path: Path) -> Iterator[bool]:
    """Locks a folder for the block and removes what a dead process left in it. Yields False if a running
    process holds the folder or has just renamed it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())
        except BlockingIOError:
            is_ours = False
        for leftover in path.iterdir() if is_ours else ():
            remove(leftover)
        yield is_ours
    finally:
        os.close(descriptor)


@contextmanager
def naming_full_disk(folder: Path) -> Iterator[None]:
    """Turns errors about a full disk or quota, during the block, into an error that names the folder. The
    system's error does not name files that were already open.

    Args:
        folder: the folder that is written to, or would be created.

    Raises:
        RecsysError: the disk or quota is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        existing = next(path for path in [folder, *folder.absolute().parents] if path.exists())
        free = shutil.disk_usage(existing).free
        raise RecsysError(
            f"no space left on {folder} ({error}): {free:,} bytes are free. Make room and start the same "
            "command again"
        ) from error


@contextmanager
def locked(path: Path, *, shared: bool = False) -> Iterator[bool]:
    """Holds a lock file during the block; yields False if another running process holds it.

    The system releases the lock when the process ends, however it ends. The file remains, which is harmless.

    Args:
        path: the lock file, created if it is missing.
        shared: whether other processes may hold the lock too, if they share it.
    """
    with path.open("a") as file:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def write_manifest(folder: Path, hashed: Mapping[str, "ListedFile"] | None = None) -> dict[str, "ListedFile"]:
    """Writes `manifest.json` with the hash and size in bytes of every other file of a folder but an old
    signature, and returns its entries by path in the folder.

    Args:
        folder: the folder.
        hashed: entries of files that need not be read again, by path in the folder.
    """
    entries = listed(folder, "*", leave_out={MANIFEST, SIGNATURE, *(hashed or {})}) | dict(hashed or {})
    content = {"files": {name: asdict(entry) for name, entry in sorted(entries.items())}}
    write_text(folder / MANIFEST, json.dumps(content, indent=1))
    return entries


def listed(folder: Path, pattern: str, leave_out: Collection[str] = ()) -> dict[str, "ListedFile"]:
    """Returns the manifest's entry of each file in a folder, at any depth, by its path in the folder.

    Args:
        folder: the folder.
        pattern: pattern of the files' names.
        leave_out: paths in the folder that are not read.
    """
    names = {str(path.relative_to(folder)): path for path in sorted(folder.rglob(pattern)) if path.is_file()}
    return {
        name: ListedFile(sha256(path), path.stat().st_size)
        for name, path in names.items()
        if name not in leave_out
    }


def manifest_faults(folder: Path) -> list[str]:
    """Returns the differences between a folder and its manifest, one line each; empty if it is complete."""
    try:
        files = _listed(folder)
    except FileNotFoundError:
        return [f"{folder / MANIFEST}: missing"]
    except (OSError, ValueError, TypeError) as error:
        return [f"{folder / MANIFEST}: not a manifest ({error})"]
    faults = []
    for name, entry in files.items():
        path = folder / name
        try:
            if not path.is_file():
                faults.append(f"{path}: missing")
            elif ListedFile(sha256(path), path.stat().st_size) != entry:
                faults.append(f"{path}: its bytes differ from the manifest")
        except (OSError, ValueError) as error:
            faults.append(f"{path}: cannot be read ({error})")
    return faults


def listed_names(folder: Path) -> list[str]:
    """Returns the names in a folder's manifest, as they stand there.

    Raises:
        OSError, ValueError, TypeError: there is no manifest that can be read.
    """
    return list(_listed(folder))


def not_in_manifest(folder: Path) -> list[Path]:
    """Returns the files of a folder that its manifest does not name, sorted; all files without a manifest."""
    try:
        listed = {folder / name for name in [MANIFEST, SIGNATURE, *_listed(folder)]}
    except (OSError, ValueError, TypeError):
        listed = set()
    return sorted(path for path in folder.rglob("*") if not path.is_dir() and path not in listed)


@dataclass(frozen=True)
class ListedFile:
    """The entry of one file in a manifest."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class _Manifest:
    files: dict[str, ListedFile]


def _listed(folder: Path) -> dict[str, ListedFile]:
    return typed_json.parse((folder / MANIFEST).read_bytes(), _Manifest).files
