"""States are copied to an address, whole or not at all, and a run with an empty folder goes on from there."""

import shutil

import fsspec
import pytest
import torch.distributed as dist

from recsys import config
from recsys.data.validation import compare_with_files
from recsys.errors import RecsysError
from recsys.training.checkpoint import Checkpoints
from recsys.training.remote_copies import RemoteCopies
from tests.integration.runs import CONFIG, records, tensors, train
from tests.training.test_checkpoint import names, state_of
from tests.training.test_checkpoint import tensors as some_tensors


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def address():
    """An empty place in memory."""
    filesystem = fsspec.filesystem("memory")
    yield "memory://bucket/run"
    filesystem.rm("/bucket", recursive=True)


def remote_names(address: str) -> list[str]:
    filesystem, root = fsspec.core.url_to_fs(address)
    return sorted(path.removeprefix(f"{root}/") for path in filesystem.find(root))


def test_copies_follow_the_states_and_a_damaged_one_is_skipped(tmp_path, group, address, caplog):
    here = Checkpoints(tmp_path / "here", keep=3, copy_to=address)
    for step in (1, 2, 3, 4, 5):
        here.save(some_tensors(step), state_of(step, best=1))
    here.require_copied()
    there = remote_names(address)
    expected = [
        str(path.relative_to(tmp_path / "here")) for path in (tmp_path / "here").rglob("*") if path.is_file()
    ]
    assert there == sorted(expected) and {name.split("/")[0][-1] for name in there} == {"1", "3", "4", "5"}

    filesystem, root = fsspec.core.url_to_fs(address)
    filesystem.pipe(f"{root}/step-00000005/__0_0.distcp", b"damaged")
    filesystem.rm(f"{root}/step-00000004/manifest.json")
    moved = Checkpoints(tmp_path / "moved", copy_to=address)
    assert moved.newest() == tmp_path / "moved" / "step-00000003"
    assert "run/step-00000005 is damaged and skipped" in caplog.text
    assert names(tmp_path / "moved") == ["step-00000001", "step-00000003"]


def test_a_run_goes_on_in_another_folder(tmp_path):
    """With a folder as the address; the best state is fetched beside the newest one."""
    copies = f'train.checkpoint.copy_to="file://{tmp_path}/copies"'
    short = ("train.num_steps=10", "train.evaluation.every_steps=3", "train.checkpoint.every_steps=2", copies)
    assert train(tmp_path / "whole", *short, f'train.checkpoint.copy_to="file://{tmp_path}/unused"') == 0
    assert train(tmp_path / "first", *short, "train.evaluation.patience=1") == 0
    stopped = max(records(tmp_path / "first"))
    assert 3 < stopped < 10
    shutil.move(tmp_path / "first", tmp_path / "gone")
    assert train(tmp_path / "second", *short) == 0
    later = {step: x for step, x in records(tmp_path / "whole").items() if step > stopped}
    assert records(tmp_path / "second") == later
    last = "checkpoints/step-00000010"
    expected, actual = tensors(tmp_path / "whole" / last), tensors(tmp_path / "second" / last)
    assert all((expected[name] == actual[name]).all() for name in expected)


def test_an_address_that_fails_is_a_warning_and_an_error_at_the_end(
    tmp_path, group, address, monkeypatch, caplog
):
    checkpoints, send = Checkpoints(tmp_path, copy_to=address), RemoteCopies._send

    def fail(self, path, names):
        raise ConnectionError("unplugged")

    monkeypatch.setattr(RemoteCopies, "_send", fail)
    path = checkpoints.save(some_tensors(), state_of(1))
    assert f"step-00000001 was not copied to {address}: ConnectionError: unplugged" in caplog.text
    with pytest.raises(RecsysError, match=f"unplugged. The state itself is in {tmp_path}"):
        checkpoints.require_copied()
    assert checkpoints.newest() == path and remote_names(address) == []
    monkeypatch.setattr(RemoteCopies, "_send", send)
    checkpoints.save(some_tensors(), state_of(2))
    checkpoints.require_copied()
    assert {name.split("/")[0] for name in remote_names(address)} == {"step-00000002"}


def test_validation_knows_protocols(tmp_path):
    pipeline = config.prepare(CONFIG, ["train.checkpoint.copy_to='memry://x'"]).pipeline
    (fault,) = compare_with_files(pipeline).faults
    assert fault.startswith("memry://x: memry:// is not a known protocol. Did you mean memory://?")
