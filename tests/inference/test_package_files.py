"""Malicious packages: each is refused by the name of its file, before that file is used."""

import os
import stat
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recsys import files
from recsys.inference.package_files import MAX_TEXT, check_files, check_parquet, sign
from recsys.inference.program import PackageError, Program


@pytest.fixture
def package(tmp_path) -> Path:
    """A folder with a file of each kind, and its manifest."""
    folder = tmp_path / "package"
    (folder / "vocabulary").mkdir(parents=True)
    (folder / "package.json").write_text("{}")
    pq.write_table(pa.table({"id": ["a", "b"]}), folder / "vocabulary" / "item.parquet")
    files.write_manifest(folder)
    check_files(folder)
    return folder


def refused(folder: Path, message: str, **options: Path) -> None:
    with pytest.raises(PackageError, match=message):
        check_files(folder, **options)


def test_links_and_devices_are_refused(package, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("{}")
    content = (package / "package.json").read_bytes()
    (package / "package.json").unlink()
    (package / "package.json").symlink_to(secret)
    # Its bytes are those of the manifest, so no hash tells.
    refused(package, r"package\.json: a package holds plain files only, no links")
    (package / "package.json").unlink()
    (package / "package.json").write_bytes(content)
    check_files(package)
    (package / "more").symlink_to(tmp_path, target_is_directory=True)
    refused(package, "more: a package holds plain files only")
    (package / "more").unlink()
    os.mkfifo(package / "pipe")
    refused(package, "pipe: a package holds plain files only")
    (package / "pipe").unlink()
    # The folder itself may be a link, as deployments have it.
    (tmp_path / "current").symlink_to(package)
    check_files(tmp_path / "current")


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "vocabulary/../../secret", "a\\..\\b", "./x"])
def test_a_manifest_names_nothing_outside_of_its_folder(package, tmp_path, name):
    (tmp_path / "secret").write_text("x")
    manifest = package / files.MANIFEST
    manifest.write_text(manifest.read_text().replace("package.json", name.replace("\\", "\\\\")))
    refused(package, r"manifest\.json: it names .*, which is no plain path within the package")


def test_a_file_that_is_not_in_the_manifest_is_refused(package):
    (package / "vocabulary" / "user.parquet").write_bytes(b"PAR1")
    refused(package, r"user\.parquet: is not in manifest\.json")
    (package / "vocabulary" / "user.parquet").rename(package / ".notes")
    check_files(package)


@pytest.mark.parametrize("name", ["package.json", "manifest.json", "config.resolved", "parity.json"])
def test_a_huge_text_is_refused_by_its_size(package, name):
    with (package / name).open("ab") as file:
        file.truncate(MAX_TEXT + 1)
    refused(package, rf"{name}: has {MAX_TEXT + 1:,} bytes, at most")


def test_a_small_parquet_file_does_not_fill_the_memory(tmp_path):
    path = tmp_path / "zeros.parquet"
    zeros = pa.table({"id": pa.array([0] * 2**20, pa.int64())})
    with pq.ParquetWriter(path, zeros.schema, compression="zstd", use_dictionary=False) as writer:
        for _ in range(9):
            writer.write_table(zeros)
    assert path.stat().st_size < 100_000
    with pytest.raises(PackageError, match=r"zeros.*unpack to 9,437,184 rows and 75,\d+,\d+ bytes"):
        check_parquet(path)
    # Decoded, these are 4 GB: a text of a megabyte that stands there 4,000 times.
    path = tmp_path / "texts.parquet"
    indices = pa.array([0] * 4000, pa.int32())
    texts = pa.DictionaryArray.from_arrays(indices, pa.array(["x" * 10**6]))
    pq.write_table(pa.table({"id": texts}), path, compression="zstd")
    with pytest.raises(PackageError, match=r"texts\.parquet: an id stands in it more than once"):
        check_parquet(path)
    pq.write_table(pa.table({"id": pa.array([f"item {i}" for i in range(5000)])}), path, row_group_size=999)
    check_parquet(path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(PackageError, match=r"texts\.parquet: cannot be read"):
        check_parquet(path)


def test_a_program_has_no_entry_that_leads_out_of_it(tmp_path):
    path = tmp_path / "model.pt2"
    link = zipfile.ZipInfo("data/link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    for entry in ("../../evil.so", "/tmp/evil.so", "data\\..\\..\\evil.so", link):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(entry, b"x")
        with pytest.raises(PackageError, match=r"model\.pt2: its entry .* leads out of it: do not use it"):
            Program(path, [], torch.device("cpu"))


def keys(folder: Path, name: str) -> tuple[Path, Path]:
    """Writes a private and a public key."""
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()))
    public.write_bytes(
        key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
    )
    return private, public


def test_only_the_owner_of_the_key_makes_packages(package, tmp_path):
    pytest.importorskip("cryptography")
    private, public = keys(tmp_path, "ours")
    their_key, their_public = keys(tmp_path, "theirs")
    refused(package, "it is not signed; recsys.export --sign-key signs", verify_key=public)
    sign(package, private)
    check_files(package, public)
    check_files(package)
    refused(
        package, "its signature is not by the key of .*theirs.pub: do not use it", verify_key=their_public
    )
    # Whoever changes a file can make its manifest agree, but not the signature.
    (package / "package.json").write_text('{"changed": 1}')
    refused(package, "its bytes differ from the manifest", verify_key=public)
    files.write_manifest(package)
    check_files(package)
    refused(package, "its signature is not by the key", verify_key=public)
    sign(package, their_key)
    refused(package, "its signature is not by the key", verify_key=public)
    refused(package, "ours.pem: not a public key in PEM", verify_key=private)
    with pytest.raises(PackageError, match="ours.pub: not a private key in PEM without a password"):
        sign(package, public)
