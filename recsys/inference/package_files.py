"""Checks the files of a package before any is parsed: their names, kinds, sizes, hashes and signature.

A package from elsewhere could name files outside of its folder, by a path or a symbolic link, or hold small
files that fill the memory. A signature over the manifest proves who made a package.
"""

from pathlib import Path, PurePosixPath

import pyarrow as pa
import pyarrow.parquet as pq

from recsys import files
from recsys.data.arrow import first_line, is_text
from recsys.errors import InstallationError
from recsys.inference.program import PackageError

MAX_TEXT = 64 << 20
"""Most bytes of a file of JSON or a config."""

_RATIO, _SMALL = 64, 64 << 20
"""A parquet file may unpack to this multiple of its size, or to this number of bytes if that is more."""


def check_files(folder: Path, verify_key: Path | None = None) -> None:
    """Checks all files of a package; opens parquet files, but reads no values of numbers.

    Args:
        folder: folder of the package, which itself may be a symbolic link.
        verify_key: PEM file of the public key that must have signed the package; None to accept any.

    Raises:
        PackageError: names the file that is damaged or must not be in a package.
        InstallationError: a signature is to be verified, and the library `cryptography` is missing.
    """
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise PackageError(f"{path}: a package holds plain files only, no links: copy the file itself")
    for name in (files.MANIFEST, "package.json", "config.resolved", "parity.json"):
        path = folder / name
        if path.is_file() and path.stat().st_size > MAX_TEXT:
            raise PackageError(
                f"{path}: has {path.stat().st_size:,} bytes, at most {MAX_TEXT:,} are expected"
            )
    if verify_key is not None:
        _verify(folder, verify_key)
    try:
        names = files.listed_names(folder)
    except (OSError, ValueError, TypeError):
        # `manifest_faults` says what is wrong.
        names = []
    for name in names:
        require_inside(name, f"{folder / files.MANIFEST}: it")
    faults = files.manifest_faults(folder)
    if faults:
        raise PackageError("\n".join([*faults, "The package is incomplete: export it again."]))
    for path in files.not_in_manifest(folder):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not is_hidden:
            raise PackageError(f"{path}: is not in {files.MANIFEST}, so nobody vouches for it: remove it")
    for name in names:
        if name.endswith(".parquet"):
            check_parquet(folder / name)


def require_inside(name: str, where: str) -> None:
    """Raises PackageError unless a name is a relative path that stays within its folder.

    Args:
        name: the path, with slashes.
        where: the beginning of the sentence, which says where the name stands.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or str(path) != name:
        raise PackageError(f"{where} names {name!r}, which is no plain path within the package")


def check_parquet(path: Path) -> None:
    """Raises PackageError if a parquet file would unpack to far more than its size, or is damaged.

    The footer tells the sizes of pages. A column of ids is read as a dictionary, which takes the memory of
    its distinct texts only: a text that stands there millions of times would fill the memory once decoded.
    """
    size = path.stat().st_size
    limit = max(_RATIO * size, _SMALL)
    try:
        with pq.ParquetFile(path, read_dictionary=["id"]) as opened:
            metadata = opened.metadata
            unpacked = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
            if unpacked > limit or metadata.num_rows > limit:
                what = f"its {size:,} bytes unpack to {metadata.num_rows:,} rows and {unpacked:,} bytes"
                raise PackageError(f"{path}: {what}; a package has no such file")
            names = opened.schema_arrow.names
            if "id" in names and pa.types.is_dictionary(opened.schema_arrow.field("id").type):
                _require_distinct(opened, path)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise PackageError(f"{path}: cannot be read ({first_line(error)}): export it again") from error


def _require_distinct(opened: pq.ParquetFile, path: Path) -> None:
    for number in range(opened.metadata.num_row_groups):
        column = opened.read_row_group(number, columns=["id"])["id"]
        if not is_text(column.type.value_type):
            return
        distinct = sum(len(chunk.dictionary) for chunk in column.unify_dictionaries().chunks[:1])
        if distinct < len(column) - column.null_count:
            raise PackageError(f"{path}: an id stands in it more than once: export it again")


def sign(folder: Path, key_file: Path) -> None:
    """Writes the signature of a package's manifest.

    Args:
        folder: a complete package.
        key_file: PEM file of an Ed25519 private key without a password.

    Raises:
        PackageError: the file holds no such key.
        InstallationError: the library `cryptography` is missing.
    """
    key = load_private_key(key_file)
    (folder / files.SIGNATURE).write_bytes(key.sign((folder / files.MANIFEST).read_bytes()))


def load_private_key(key_file: Path):
    """Reads an Ed25519 private key; errors are those of `sign`."""
    _require_library()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(key_file.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise PackageError(f"{key_file}: not a private key in PEM without a password ({error})") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise PackageError(f"{key_file}: not an Ed25519 key; openssl genpkey -algorithm ed25519 makes one")
    return key


def _verify(folder: Path, verify_key: Path) -> None:
    _require_library()
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(verify_key.read_bytes())
    except (OSError, ValueError) as error:
        raise PackageError(f"{verify_key}: not a public key in PEM ({error})") from error
    if not isinstance(key, Ed25519PublicKey):
        raise PackageError(f"{verify_key}: not an Ed25519 key")
    try:
        signature = (folder / files.SIGNATURE).read_bytes()
        key.verify(signature, (folder / files.MANIFEST).read_bytes())
    except FileNotFoundError as error:
        missing = "it is not signed; recsys.export --sign-key signs a package"
        raise PackageError(f"{folder}: {missing} ({Path(error.filename).name} is missing)") from None
    except InvalidSignature:
        raise PackageError(
            f"{folder}: its signature is not by the key of {verify_key}: do not use it"
        ) from None


def _require_library() -> None:
    try:
        import cryptography  # noqa: F401
    except ModuleNotFoundError as error:
        what = "signatures of packages need the library cryptography"
        raise InstallationError(f"{what}: pip install 'generative-recsys[sign]'") from error
