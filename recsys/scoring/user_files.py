"""`UserFiles`: encoded users in the files of a folder, the last tier of a `UserStore`.

A file is a keyed BLAKE2b hash followed by tensors in the format of safetensors. The key of the hash is the
version of the weights, so a file of other weights, of another user, or with a single wrong bit does not match
and counts as absent. Files are read whole and not mapped into memory, because another process that shortens a
mapped file would end this one.
"""

import json
import logging
import os
from collections import OrderedDict
from collections.abc import Hashable
from hashlib import blake2b
from pathlib import Path

import safetensors.torch
import torch

from recsys.scoring.cached_signature import CacheSpec
from recsys.scoring.user_store import StoredUser

ENDING = ".user"
"""End of the names of files. Other files of the folder are left alone."""

_HASH_BYTES, _LENGTH_BYTES = 32, 8

log = logging.getLogger(__name__)


class UserFiles:
    """Keeps users in files, least recently used first. Not for several threads at once.

    Files of earlier processes are found again. Files of other versions count against the bound until they
    are the oldest ones. Each store that uses a folder keeps the bound for the files that it knows, so two
    stores at the same time may pass it together.

    Args:
        folder: the folder, which is made if it does not exist.
        most_bytes: bound on the size of all files.
        version: 1 to 64 bytes that identify the weights and the config.
        spec: describes the tensors of a cache.

    Raises:
        OSError: the folder cannot be made or read.
    """

    def __init__(self, folder: Path, most_bytes: int, version: bytes, spec: CacheSpec):
        self.num_bytes, self._folder, self._most_bytes = 0, folder, most_bytes
        self._version, self._spec, self._failed = version, spec, False
        folder.mkdir(parents=True, exist_ok=True)
        with os.scandir(folder) as entries:
            known = [(entry.stat(), entry.name) for entry in entries if entry.name.endswith(ENDING)]
        known.sort(key=lambda pair: pair[0].st_mtime_ns)
        self._sizes = OrderedDict((name, status.st_size) for status, name in known)
        self.num_bytes = sum(self._sizes.values())

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, key: Hashable, user: StoredUser) -> list[tuple[Hashable, StoredUser]]:
        """Writes a user who is not here, and removes those who no longer fit; returns an empty list.

        If a file cannot be written, the user is not kept; the first time, this is logged.
        """
        name, content = self._name(key), self._content(key, user)
        if len(content) > self._most_bytes:
            return []
        while self.num_bytes + len(content) > self._most_bytes:
            self._remove(next(iter(self._sizes)))
        path = self._folder / name
        aside = path.with_name(f"{path.stem}.{os.getpid()}{ENDING}")
        try:
            aside.write_bytes(content)
            aside.replace(path)
        except OSError as error:
            aside.unlink(missing_ok=True)
            if not self._failed:
                log.warning("users cannot be stored in %s: %s", self._folder, error)
            self._failed = True
            return []
        self._sizes[name] = len(content)
        self.num_bytes += len(content)
        return []

    def pop(self, key: Hashable) -> StoredUser | None:
        """Removes a user and returns it on the host; None if it is not here or its file is damaged."""
        name = self._name(key)
        if name not in self._sizes:
            return None
        try:
            content = (self._folder / name).read_bytes()
        except FileNotFoundError:
            content = b""
        self._remove(name)
        return self._user(key, content)

    def _remove(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)
        self.num_bytes -= self._sizes.pop(name)

    def _name(self, key: Hashable) -> str:
        digest = blake2b(_text(key), key=self._version, digest_size=_HASH_BYTES)
        return digest.hexdigest() + ENDING

    def _hash(self, key: Hashable, content: memoryview) -> bytes:
        digest = blake2b(key=self._version, digest_size=_HASH_BYTES)
        for part in (len(_text(key)).to_bytes(_LENGTH_BYTES, "little"), _text(key), content):
            digest.update(part)
        return digest.digest()

    def _content(self, key: Hashable, user: StoredUser) -> bytes:
        tensors = {
            spec.name: tensor.cpu().clone(memory_format=torch.contiguous_format)  # must share no memory
            for spec, tensor in zip(self._spec.specs(), self._spec.flatten(user.cache), strict=True)
        }
        facts = {"facts": json.dumps({"digest": user.digest.hex(), "num_events": user.num_events})}
        data = safetensors.torch.save(tensors, facts)
        return self._hash(key, memoryview(data)) + data

    def _user(self, key: Hashable, content: bytes) -> StoredUser | None:
        data = memoryview(content)[_HASH_BYTES:]
        if content[:_HASH_BYTES] != self._hash(key, data):
            if content:
                log.warning("a damaged file of a user in %s is ignored", self._folder)
            return None
        header = int.from_bytes(data[:_LENGTH_BYTES], "little")
        metadata = json.loads(bytes(data[_LENGTH_BYTES : _LENGTH_BYTES + header]))["__metadata__"]
        facts = json.loads(metadata["facts"])
        cache = self._spec.cache(safetensors.torch.load(bytes(data)))
        return StoredUser(bytes.fromhex(facts["digest"]), facts["num_events"], cache)


def _text(key: Hashable) -> bytes:
    return f"{type(key).__name__}:{key!r}".encode()
