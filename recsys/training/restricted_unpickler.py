"""Reads a checkpoint of torch.distributed.checkpoint without executing anything in it.

The library's reader unpickles `.metadata` and every entry that is not a tensor, so a foreign file can run
code. This reader accepts only a fixed list of classes, only tensors, and only data files in the checkpoint's
folder.
"""

import io
import pickle
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, Metadata
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata

from recsys.errors import RecsysError

_ALLOWED = {
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
}
_PATHS = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path"}
_DTYPES = {str(x).removeprefix("torch.") for x in vars(torch).values() if isinstance(x, torch.dtype)}


_DATA_FILE = re.compile(r"__\d+_\d+\.distcp")

_DAMAGED = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    ImportError,
    MemoryError,
    RuntimeError,
    struct.error,
)
"""Errors that can arise when damaged bytes are unpickled and used. RecursionError is a RuntimeError."""

DAMAGED_TENSORS = (*_DAMAGED, OSError)
"""Errors that reading tensors from damaged files can raise."""


class SafeReader(FileSystemReader):
    """A `FileSystemReader` whose `.metadata` can neither run code nor name a file outside `folder`."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        """Reads the checkpoint's table of contents. The library passes the rank, which is not used.

        Raises:
            RecsysError: the file is missing or damaged, holds a class or an entry that is not allowed, or
                names a file outside the folder.
        """
        metadata = read_metadata(self._folder)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


def read_metadata(folder: Path) -> Metadata:
    """Reads the table of contents of a checkpoint folder; see `SafeReader.read_metadata`."""
    path = folder / ".metadata"
    try:
        metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
        return _checked(metadata, path)
    except OSError as error:
        raise RecsysError(f"{path}: {error.strerror}") from error
    except _DAMAGED as error:
        raise RecsysError(f"{path}: not the metadata of a checkpoint ({error})") from error


def read_chunks(folder: Path, name: str) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yields the stored shards of one tensor, each with the place of its first element in the whole tensor.

    Raises:
        RecsysError: the metadata or a shard cannot be read.
    """
    metadata = read_metadata(folder)
    for index, info in metadata.storage_data.items():
        if index.fqn != name:
            continue
        try:
            with (folder / info.relative_path).open("rb") as file:
                file.seek(info.offset)
                content = io.BytesIO(file.read(info.length))
            chunk = torch.load(content, map_location="cpu", weights_only=True)
        except DAMAGED_TENSORS as error:
            raise RecsysError(f"{folder / info.relative_path}: {name} cannot be read ({error})") from error
        yield tuple(index.offset or (0,) * chunk.dim()), chunk


def _checked(metadata: object, path: Path) -> Metadata:
    """Returns the metadata if it lists only tensors in files of its folder; else raises RecsysError."""
    if not isinstance(metadata, Metadata):
        raise RecsysError(f"{path}: holds a {type(metadata).__name__}, not the metadata of a checkpoint")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise RecsysError(f"{path}: {name} is not a tensor; only tensors are loaded")
        if not isinstance(entry.properties.dtype, torch.dtype) or not isinstance(entry.size, torch.Size):
            raise RecsysError(f"{path}: {name} has no size or dtype; not the metadata of a checkpoint")
    for info in metadata.storage_data.values():
        if not _DATA_FILE.fullmatch(info.relative_path):
            raise RecsysError(f"{path}: {info.relative_path!r} is not a file in the checkpoint's folder")
        if info.transform_descriptors:
            raise RecsysError(f"{path}: {info.relative_path} is transformed by {info.transform_descriptors}")
    return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_allowed = (module, name) in _ALLOWED or (module == "torch" and name in _DTYPES)
        if is_allowed:
            return super().find_class(module, name)
        if module.split(".")[0] == "pathlib" and name in _PATHS:
            return _path_text
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed")


def _path_text(*parts: str) -> str:
    """Stands in for pickled path classes. Only the text matters, since the checkpoint may have been moved."""
    return "/".join(parts)
