"""Commands load only packages with the right signature, and none that names files elsewhere."""

import shutil

import pytest

import recsys
from recsys import files
from recsys.inference.package_files import sign
from recsys.inference.program import PackageError
from tests.inference.test_package_files import keys
from tests.integration.runs import command


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
    serve = ("serve", "--package", package, "--port", 0, "--dry-run", "--verify-key")
    evaluate = ("evaluate", "--package", package, "--verify-key")
    for flags in (predict, serve, evaluate):
        assert "it is not signed" in command(*flags, public, code=1)
    sign(package, private)
    for flags, answered in ((predict, "the package answers its golden rows"), (serve, "would listen")):
        assert answered in command(*flags, public)
        assert "its signature is not by the key" in command(*flags, theirs, code=1)
    assert "its signature is not by the key" in command(*evaluate, theirs, code=1)
    assert recsys.load(package, verify_key=public).package is not None
    with pytest.raises(PackageError, match="its signature is not by the key"):
        recsys.load(package, verify_key=theirs)
