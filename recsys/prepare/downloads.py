"""Downloads inputs that are addresses, such as `https://host/log.csv.gz` or `s3://bucket/logs`.

http and https need no package. fsspec reads all other protocols, each of which needs a package of its own.
"""

import errno
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from urllib.parse import quote, unquote, urlsplit

from recsys.data.filesystems import open_filesystem
from recsys.errors import DataError, RecsysError

TIMEOUT = 60
"""Seconds without an answer after which a server is considered gone."""

URL_CHARACTERS = "%/:?#[]@!$&'()*+,;=~"
"""Characters that are kept in an address; others, such as blanks and letters with accents, are escaped."""


def location(text: str) -> Path | str:
    """Parses a flag that takes a path or an address, for `type=`: addresses stay text."""
    return text if "://" in text else Path(text)


def download(address: str, folder: Path, patterns: Sequence[str], maxdepth: int | None = None) -> Path:
    """Downloads a file, or the files of a folder, and returns the path of the copy.

    Args:
        address: a file or a folder; over http and https a file.
        folder: folder of the copy; a file keeps its name.
        patterns: names of the files to take from a folder, such as `*.csv`.
        maxdepth: levels of a folder to search; None: all.

    Raises:
        DataError: the file does not exist or cannot be read; names address and remedy.
        InstallationError: a package for the protocol is missing.
    """
    if address.startswith(("http://", "https://")):
        with _naming(address):
            return _download_http(address, folder)
    filesystem, path = open_filesystem(address)
    with _naming(address):
        if not filesystem.isdir(path):
            return _copy(filesystem, path, folder / _file_name(path), address)
        names = [
            name.removeprefix(path.rstrip("/") + "/")
            for name in sorted(filesystem.find(path, maxdepth=maxdepth))
        ]
    chosen = [
        name
        for name in names
        if any(fnmatch(PurePosixPath(name).name, pattern) for pattern in patterns)
        and ".." not in PurePosixPath(name).parts
    ]
    if not chosen:
        raise DataError(f"{address}: no file {' or '.join(patterns)} in this folder")
    for name in chosen:
        shown = f"{address.rstrip('/')}/{name}"
        with _naming(shown):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            _copy(filesystem, f"{path.rstrip('/')}/{name}", folder / name, shown)
    return folder


def _copy(filesystem, path: str, target: Path, address: str) -> Path:
    size = filesystem.info(path)["size"]
    _announce(address, size)
    filesystem.get_file(path, str(target))
    _require_whole(address, target, size)
    return target


def _download_http(address: str, folder: Path) -> Path:
    target = folder / _file_name(unquote(urlsplit(address).path))
    # Some servers refuse the default User-Agent of urllib.
    request = urllib.request.Request(quote(address, URL_CHARACTERS), headers={"User-Agent": "recsys"})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer, target.open("wb") as file:
        length = answer.headers.get("Content-Length")
        size = int(length) if length is not None else None
        _announce(address, size)
        shutil.copyfileobj(answer, file, 1 << 20)
    _require_whole(address, target, size)
    return target


def _file_name(path: str) -> str:
    name = PurePosixPath(path).name
    return "download" if name in ("", "..") else name


def _announce(address: str, size: int | None) -> None:
    print(f"downloading {address}" + ("" if size is None else f" ({size:,} bytes)"), flush=True)


def _require_whole(address: str, target: Path, size: int | None) -> None:
    came = target.stat().st_size
    if size is not None and came != size:
        raise DataError(
            f"{address}: {came:,} of {size:,} bytes came before the connection ended; start the same command "
            "again"
        )


@contextmanager
def _naming(address: str) -> Iterator[None]:
    """Turns any error of reading an address, during the block, into one that names address and remedy."""
    try:
        yield
    except RecsysError:
        raise
    except Exception as error:  # packages of protocols raise errors of their own kinds
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DataError(f"{address}: {_explained(error)}") from error


def _explained(error: Exception) -> str:
    status = error.code if isinstance(error, urllib.error.HTTPError) else None
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return f"no such file or folder ({error}); check the spelling"
    if isinstance(error, PermissionError) or status in (401, 403):
        return (
            f"access is denied ({error}); give an address that needs no login, or the credentials that the "
            "package of the protocol looks for"
        )
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    text = str(reason) or type(error).__name__
    return f"cannot be read ({text}); check address and network, and start the same command again"
