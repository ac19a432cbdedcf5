"""Opens the file system of an address such as `s3://bucket/part.parquet`, or names the missing package."""

import difflib

import fsspec
from fsspec.registry import known_implementations

from recsys.errors import DataError, InstallationError


def open_filesystem(address: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Returns the file system of an address, and the path in it.

    Args:
        address: a local path, or an address of a protocol that fsspec knows.

    Raises:
        DataError: fsspec does not know the protocol.
        InstallationError: the package that reads the protocol is not installed.
    """
    protocols = [link.partition("://")[0] for link in address.split("::") if "://" in link]
    for protocol in protocols:
        if protocol not in fsspec.available_protocols():
            near = difflib.get_close_matches(protocol, known_implementations, n=1)
            hint = f" Did you mean {near[0]}://?" if near else ""
            raise DataError(
                f"{address}: {protocol}:// is not a known protocol.{hint} Known protocols are https://, "
                "s3://, gs://, az://, hf:// and others"
            )
    try:
        return fsspec.core.url_to_fs(address)
    except ImportError as error:
        classes = [
            known_implementations[name]["class"] for name in protocols if name in known_implementations
        ]
        packages = {name.partition(".")[0] for name in classes} - {"fsspec"}
        pip = f"python -m pip install {' '.join(sorted(packages))}" if packages else "install it with pip"
        raise InstallationError(
            f"{address}: the package that reads it is not installed ({error}); type: {pip}"
        ) from error
