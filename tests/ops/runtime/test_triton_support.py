"""The assembler of Triton's kernels: who is warned of it, once, and with what to type."""

import logging

import pytest
import torch

from recsys import environment
from recsys.ops.runtime import triton_support


@pytest.fixture
def machine(monkeypatch):
    """A machine with a GPU of some capability and a ptxas of some version; what a first kernel says there."""
    triton_support._warn_about_assembler.cache_clear()
    # Other tests of the same process may have chosen the packaged one.
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)

    def make(capability, version, path="/some/ptxas"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(environment, "find_ptxas", lambda: path)
        monkeypatch.setattr(environment, "tool_version", lambda path: version)
        for _ in range(3):
            triton_support.load("json")

    yield make
    triton_support._warn_about_assembler.cache_clear()


@pytest.mark.parametrize(
    ("capability", "version", "warned"),
    [
        ((9, 0), "12.8", True),
        ((9, 0), "", True),
        ((9, 0), "13.3", False),
        ((9, 0), "13.5", False),
        ((8, 0), "12.8", False),
        (None, "12.8", False),
    ],
)
def test_an_old_assembler_on_hopper_is_a_warning_once(machine, caplog, capability, version, warned):
    with caplog.at_level(logging.WARNING):
        machine(capability, version)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == int(warned)
    for message in messages:
        assert message.startswith(f"ptxas {version or 'of unknown version'} (/some/ptxas) miscompiles some")
        assert message.endswith("Type: pip install 'nvidia-cuda-nvcc>=13.3'")


def test_without_any_assembler_too(machine, caplog):
    machine((9, 0), "", path=None)
    assert "ptxas of unknown version (None)" in caplog.text


def test_an_assembler_that_the_user_named_must_go_first(machine, caplog, monkeypatch):
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/some/ptxas")
    machine((9, 0), "12.8")
    assert "Type: unset TRITON_PTXAS_PATH; pip install 'nvidia-cuda-nvcc>=13.3'" in caplog.text
