"""Commands load only packages with the right signature, and none that names files elsewhere."""

import shutil

import pytest

import recsys
from recsys import files
from recsys.inference.package_files import sign
from recsys.inference.program import PackageError
from tests.inference.test_package_files import keys
from tests.integration.runs import command
from tests.integration.test_serve import said_by_serve


@pytest.fixture
def package(ranker, tmp_path):
    shutil.copytree(ranker.package, tmp_path / "export")
    return tmp_path / "export"


def test_a_vocabulary_outside_of_the_package_is_not_read(package):
    config = package / "config.resolved"
    config.write_text(config.read_text().replace("vocabulary/hour.parquet", "../hour.parquet"))
    files.write_manifest(package)
    with pytest.raises(
        PackageError, match=r"config\.resolved: hour names '../hour.parquet', which is no plain"
    ):
        recsys.load(package)


def test_commands_want_the_signature_that_they_are_told(package, ranker, tmp_path):
    pytest.importorskip("cryptography")
    private, public = keys(tmp_path, "ours")
    _, theirs = keys(tmp_path, "theirs")
    predict = ("predict", "--package", package, "--input", ranker.rows, "--dry-run", "--verify-key")
    serve = ("--package", package, "--dry-run", "--verify-key")
    evaluate = ("evaluate", "--package", package, "--verify-key")
    for said in (
        command(*predict, public, code=1),
        said_by_serve(*serve, public, code=1),
        command(*evaluate, public, code=1),
    ):
        assert "it is not signed" in said
    sign(package, private)
    assert "the package answers its golden rows" in command(*predict, public)
    assert "would listen" in said_by_serve(*serve, public)
    for said in (
        command(*predict, theirs, code=1),
        said_by_serve(*serve, theirs, code=1),
        command(*evaluate, theirs, code=1),
    ):
        assert "its signature is not by the key" in said
    assert recsys.load(package, verify_key=public).package is not None
    with pytest.raises(PackageError, match="its signature is not by the key"):
        recsys.load(package, verify_key=theirs)
