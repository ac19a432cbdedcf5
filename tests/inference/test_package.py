"""Packages and the machines that they are for; `tests/integration` has whole ones."""

from pathlib import Path

import pytest
import torch

from recsys.inference.package import Description, Package, _require_device
from recsys.inference.program import PackageError


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
    with pytest.raises(PackageError, match=r"there is no package, no package.json in it$"):
        Package(tmp_path)
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "package.json").touch()
    with pytest.raises(PackageError, match=rf"no package.json in it; it is in {tmp_path}/export$"):
        Package(tmp_path)
