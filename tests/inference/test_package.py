"""Packages and the machines that they are for; `tests/integration` has whole ones."""

import dataclasses
import zipfile
from pathlib import Path

import pytest
import torch

from recsys import config
from recsys.errors import InstallationError
from recsys.inference.package import (
    Description,
    Package,
    _require_device,
    _require_same_model,
    _require_vector_each,
)
from recsys.inference.program import PackageError, Program
from recsys.scoring.signature import scoring_signature


def description(device: str, target: str) -> Description:
    return Description("ranker", 1, device, target, [], ["is_click"], 4096, 1e-4)


@pytest.fixture
def gpu(monkeypatch):
    """Says what GPU the machine has, (major, minor) or None."""

    def is_there(capability: tuple[int, int] | None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")

    return is_there


@pytest.mark.parametrize("capability", [None, (9, 0)])
def test_a_package_for_a_cpu_runs_anywhere(gpu, capability, caplog):
    gpu(capability)
    with caplog.at_level("INFO"):
        _require_device(Path("export"), description("cpu", "x86-64-v3"))
    assert ("would use its GPU" in caplog.text) == (capability is not None)


def test_a_package_for_a_gpu_wants_that_gpu(gpu):
    gpu((9, 0))
    _require_device(Path("export"), description("cuda", "sm_90"))
    gpu(None)
    with pytest.raises(PackageError, match="for a GPU of architecture sm_90; PyTorch finds no GPU"):
        _require_device(Path("export"), description("cuda", "sm_90"))
    gpu((8, 0))
    with pytest.raises(PackageError, match="architecture sm_90; H200 here is sm_80: export the run again"):
        _require_device(Path("export"), description("cuda", "sm_90"))


def test_the_folder_of_a_run_is_no_package(tmp_path):
    (tmp_path / "config.resolved").touch()
    with pytest.raises(PackageError, match=r"there is no package here \(package.json is missing\)$"):
        Package(tmp_path)
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "package.json").touch()
    with pytest.raises(PackageError, match=rf"\(package.json is missing\); it is in {tmp_path}/export$"):
        Package(tmp_path)


def test_a_description_and_a_config_belong_to_the_same_model(tmp_path):
    pipeline = config.prepare("tests/integration/tiny.config").pipeline
    inputs = [spec.to_json() for spec in scoring_signature(pipeline)]
    whole = Description("ranker", 1, "cpu", "", inputs, ["is_click", "watch_time"], 4096, 1e-4)
    _require_same_model(tmp_path, whole, pipeline)
    for change in ({"kind": "retriever"}, {"outputs": ["is_click"]}, {"inputs": inputs[1:]}):
        with pytest.raises(PackageError, match=r"package\.json: it describes another model than config\."):
            _require_same_model(tmp_path, dataclasses.replace(whole, **change), pipeline)
    with pytest.raises(PackageError, match="device is 'meta'; it must be cpu or cuda: export it again"):
        _require_device(tmp_path, dataclasses.replace(whole, device="meta"))


def test_every_item_has_a_vector(tmp_path):
    pipeline = config.prepare("configs/movielens_small_two_tower.config").pipeline
    _require_vector_each(tmp_path, torch.zeros(9125, 50), pipeline)
    for shape in ((9124, 50), (9125, 49)):
        with pytest.raises(PackageError, match="{} vectors of {} numbers; expected 9125".format(*shape)):
            _require_vector_each(tmp_path, torch.zeros(shape), pipeline)


def test_a_program_is_an_archive_without_packed_entries(tmp_path):
    path = tmp_path / "model.pt2"
    path.write_bytes(b"PK")
    with pytest.raises(PackageError, match=r"model\.pt2: not a compiled program \(File is not a zip file\)"):
        Program(path, [], torch.device("cpu"))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data", bytes(10_000_000))
    with pytest.raises(PackageError, match="unpack to 10,000,000, but a .* is not compressed: export"):
        Program(path, [], torch.device("cpu"))


def test_a_module_of_operators_that_is_missing_is_named(tmp_path):
    with pytest.raises(
        InstallationError, match=r"operators of the Python module toys_ops, which .*install it"
    ):
        Program(tmp_path / "model.pt2", [], torch.device("cpu"), ["toys_ops"])
