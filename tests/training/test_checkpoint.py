"""Checkpoints are whole or absent, load exactly what was saved, and execute nothing."""

import os
import pickle
import random
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor

from recsys.data.counts import Counts
from recsys.data.sources.base import FileMark
from recsys.errors import ConfigError, RecsysError
from recsys.training import checkpoint, checkpoint_writer, host_copies, restricted_unpickler
from recsys.training.checkpoint import Checkpoints
from recsys.training.state import Best, Inputs, Progress, SavedState, capture_rng


@pytest.fixture(autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return {
        "model.weight": torch.randn(5, 3, generator=drawn),
        "model.half": torch.randn(4, generator=drawn).bfloat16(),
        "optimizer.weight.step": torch.tensor(7.0),
    }


def state_of(step: int, best: int | None = None, loss: float = 0.1 + 0.2) -> SavedState:
    progress = Progress(step=step, best=Best("auc", 1 / 3, best) if best else None)
    progress.window.add(loss, {}, Counts())
    inputs = Inputs([FileMark("a.parquet", 10, "f0")], {"item_id": "e1"}, "c2")
    return SavedState(progress, [capture_rng(torch.device("cpu"))], inputs, "config", {"torch": "2.13.0"}, 1)


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_saved_state_comes_back_bit_for_bit(tmp_path):
    saved = tensors()
    state = state_of(12, best=7)
    path = Checkpoints(tmp_path).save(saved, state)
    assert path.name == "step-00000012"
    assert checkpoint.read_state(path) == state
    loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    checkpoint.load(path, loaded)
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)


def test_nothing_but_the_metadata_is_a_pickle(tmp_path):
    path = Checkpoints(tmp_path).save(tensors(), state_of(1))
    assert names(path) == [".metadata", "__0_0.distcp", "manifest.json", "state.json"]


def test_the_newest_and_the_best_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in range(1, 6):
        checkpoints.save(tensors(step), state_of(step, best=min(step, 2)))
    assert names(tmp_path) == ["step-00000002", "step-00000004", "step-00000005"]
    with pytest.raises(ValueError, match="at least 2"):
        Checkpoints(tmp_path, keep=1)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "manifest.json", "state.json"])
def test_a_flipped_bit_is_found_and_the_state_before_is_taken(tmp_path, name, caplog):
    checkpoints = Checkpoints(tmp_path)
    older = checkpoints.save(tensors(1), state_of(1))
    newer = checkpoints.save(tensors(2), state_of(2))
    draw = random.Random(name)
    clean = (newer / name).read_bytes()
    for _ in range(25):
        bit = draw.randrange(8 * len(clean))
        damaged = bytearray(clean)
        damaged[bit // 8] ^= 1 << bit % 8
        (newer / name).write_bytes(damaged)
        caplog.clear()
        assert Checkpoints(tmp_path).newest() == older
        assert newer.name in caplog.text
        assert name in caplog.text or name == "manifest.json"
    (newer / name).write_bytes(clean)
    assert Checkpoints(tmp_path).newest() == newer


def test_a_damaged_state_does_not_push_out_a_whole_one(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(tensors(step), state_of(step))
    (tmp_path / "step-00000002" / "__0_0.distcp").write_bytes(b"")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest() == tmp_path / "step-00000001"
    checkpoints.save(tensors(3), state_of(3))
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def test_a_state_that_is_saved_again_replaces_the_damaged_one(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(tensors(1), state_of(1))
    (path / "state.json").write_text("{")
    assert checkpoints.newest() is None
    checkpoints.save(tensors(1), state_of(1))
    assert checkpoints.newest() == path
    assert names(tmp_path) == ["step-00000001"]


def test_the_remains_of_an_interrupted_save_are_ignored_and_removed(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    whole = checkpoints.save(tensors(), state_of(1))
    for name in (".step-00000002.partial", ".step-00000001.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_bytes(b"half")
    assert checkpoints.newest() == whole
    checkpoints.save(tensors(), state_of(3))
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t | {"model.new": torch.zeros(2)}, "model.new: missing in the checkpoint"),
        (lambda t: {k: v for k, v in t.items() if k != "model.half"}, "model.half: in the checkpoint only"),
        (
            lambda t: t | {"model.weight": torch.zeros(3, 5)},
            r"model.weight: \[5, 3\] float32 in the checkpoint, \[3, 5\] float32 in this run",
        ),
        (lambda t: t | {"model.half": torch.zeros(4)}, r"model.half: \[4\] bfloat16 in the checkpoint"),
    ],
)
def test_what_does_not_fit_is_an_error_that_names_it(tmp_path, change, message):
    path = Checkpoints(tmp_path).save(tensors(), state_of(1))
    with pytest.raises(RecsysError, match=message):
        checkpoint.load(path, change(tensors()))


def test_weights_are_loaded_into_a_plain_model(tmp_path):
    torch.manual_seed(0)
    source, target = nn.Linear(3, 2), nn.Linear(3, 2)
    saved = {f"model.{name}": tensor for name, tensor in source.state_dict().items()}
    path = Checkpoints(tmp_path).save(saved | {"optimizer.weight.step": torch.tensor(1.0)}, state_of(1))
    checkpoint.load_weights(path, target)
    assert torch.equal(source.weight, target.weight)
    with pytest.raises(RecsysError, match=r"model.bias: in the checkpoint only"):
        checkpoint.load_weights(path, nn.Linear(3, 2, bias=False))
    (path / "state.json").write_text("[]")
    with pytest.raises(RecsysError, match=r"damaged: .*state.json"):
        checkpoint.load_weights(path, target)


def test_a_full_disk_is_named_before_anything_is_written(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    older = checkpoints.save(tensors(), state_of(1))
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(checkpoint_writer.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(
        RecsysError, match=r"no space left on .*: the checkpoint's tensors have 72 bytes, 10 are free"
    ):
        checkpoints.save(tensors(), state_of(2))
    assert checkpoints.newest() == older
    assert names(tmp_path) == ["step-00000001"]


def test_a_disk_that_fills_up_while_writing_is_named_and_cleared(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    older = checkpoints.save(tensors(), state_of(1))

    def fail(*_args: object, **_options: object) -> None:
        (tmp_path / ".step-00000002.partial" / "__0_0.distcp").write_bytes(b"half")
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")

    usage = iter([10**9, 100])
    monkeypatch.setattr(checkpoint_writer.dcp, "save", fail)
    free = lambda _: type("Usage", (), {"free": next(usage)})  # noqa: E731
    monkeypatch.setattr(checkpoint_writer.shutil, "disk_usage", free)
    with pytest.raises(
        RecsysError, match=r"no space left on .*: the checkpoint's tensors have 72 bytes, 100 are free"
    ):
        checkpoints.save(tensors(), state_of(2))
    assert names(tmp_path) == [older.name]


def test_a_file_that_cannot_be_written_is_named_without_a_stack(tmp_path, monkeypatch):
    def refuse(self: Path, mode: str = "r", *_rest: object) -> None:
        raise OSError(27, "File too large", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(RecsysError) as caught:
        Checkpoints(tmp_path).save(tensors(), state_of(1))
    (line,) = str(caught.value).splitlines()
    assert line.startswith(
        f"{tmp_path}/.step-00000001.partial: the checkpoint could not be written: [Errno 27]"
    )


def test_a_disk_that_fills_up_behind_the_tensors_is_named_as_it_was_then(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    older = checkpoints.save(tensors(), state_of(1))

    def fail(folder: object, hashed: object) -> None:
        raise OSError(28, "No space left on device")

    aside = tmp_path / ".step-00000002.partial"
    monkeypatch.setattr(checkpoint_writer.files, "write_manifest", fail)
    # Removing the unfinished state frees space.
    usage = lambda _: type("Usage", (), {"free": 7 if (aside / "state.json").exists() else 10**9})  # noqa: E731
    monkeypatch.setattr(checkpoint_writer.shutil, "disk_usage", usage)
    with pytest.raises(RecsysError, match=r"the checkpoint's tensors have 72 bytes, 7 are free"):
        checkpoints.save(tensors(), state_of(2))
    assert names(tmp_path) == [older.name]


def test_what_changes_after_a_copy_was_begun_is_not_in_it(tmp_path, monkeypatch):
    """The thread that writes starts only when tensors and progress have changed."""
    saved, state, changed = tensors(), state_of(3, best=2), threading.Event()
    expected, save = {name: x.clone() for name, x in saved.items()}, checkpoint_writer.dcp.save

    def late(*arguments: object, **options: object) -> None:
        assert changed.wait(30)
        save(*arguments, **options)

    monkeypatch.setattr(checkpoint_writer.dcp, "save", late)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.begin(saved, state)
    for tensor in saved.values():
        tensor.fill_(9)
    state.progress.step, state.progress.best = 4, None
    assert checkpoints.written() is None and not checkpoints.failed
    changed.set()
    path = checkpoints.wait()
    assert path == tmp_path / "step-00000003" and checkpoints.wait() is None
    assert checkpoint.read_state(path) == state_of(3, best=2)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    checkpoint.load(path, loaded)
    assert all(torch.equal(loaded[name], expected[name]) for name in saved)


def test_the_next_state_waits_for_the_one_before_and_tells_its_error(tmp_path, monkeypatch):
    checkpoints, write = Checkpoints(tmp_path), checkpoint_writer.files.write_manifest

    def slow(folder: Path, hashed: object) -> None:
        time.sleep(0.3)
        if "step-00000002" in folder.name:
            raise OSError(28, "No space left on device")
        write(folder, hashed)

    monkeypatch.setattr(checkpoint_writer.files, "write_manifest", slow)
    for step in (1, 2):
        checkpoints.begin(tensors(step), state_of(step))
    assert names(tmp_path)[-1] == "step-00000001"
    with pytest.raises(RecsysError, match=r"^no space left on .*: the checkpoint's tensors have 72 bytes"):
        checkpoints.begin(tensors(3), state_of(3))
    assert names(tmp_path) == ["step-00000001"]


class Trap:
    """Runs a command when it is unpickled."""

    def __reduce__(self):
        return (os.system, ("touch trapped",))


def test_code_in_the_metadata_is_not_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Checkpoints(tmp_path).save(tensors(), state_of(1))
    (path / ".metadata").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(RecsysError, match="system is not allowed"):
        restricted_unpickler.read_metadata(path)
    assert not (tmp_path / "trapped").exists()


def test_entries_that_are_not_tensors_are_refused(tmp_path):
    from torch.distributed import checkpoint as dcp

    dcp.save({"a": torch.zeros(2), "code": Trap()}, checkpoint_id=tmp_path / "x", no_dist=True)
    with pytest.raises(RecsysError, match="BytesStorageMetadata is not allowed"):
        restricted_unpickler.read_metadata(tmp_path / "x")


@pytest.mark.parametrize("outside", ["../other/__0_0.distcp", "/etc/passwd", "..", ""])
def test_files_outside_the_checkpoint_are_refused(tmp_path, outside):
    path = Checkpoints(tmp_path).save(tensors(), state_of(1))
    metadata = restricted_unpickler.read_metadata(path)
    for info in metadata.storage_data.values():
        info.relative_path = outside
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(RecsysError, match="is not a file in the checkpoint's folder"):
        restricted_unpickler.read_metadata(path)


def test_the_state_refuses_numbers_that_json_has_not(tmp_path):
    with pytest.raises(ValueError, match="Out of range float values"):
        Checkpoints(tmp_path).save(tensors(), state_of(1, loss=float("nan")))


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"progress": 3}', '{"progress": {}, "inputs": {"files": [1]}}']
)
def test_a_state_of_another_kind_is_named(tmp_path, text):
    path = Checkpoints(tmp_path).save(tensors(), state_of(1))
    (path / "state.json").write_text(text)
    with pytest.raises(RecsysError, match=r"state.json: an unexpected or missing part .* another version"):
        checkpoint.read_state(path)


def test_other_entries_beside_the_states_are_no_states(tmp_path):
    for name in ("step-²", "step-1", f"step-{'9' * 30}"):
        (tmp_path / name).mkdir()
    (tmp_path / ".step-00000001.old").write_text("left by hand")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.steps() == []
    saved = checkpoints.save(tensors(), state_of(1))
    assert checkpoints.steps() == [saved] and not (tmp_path / ".step-00000001.old").exists()
    for which in ("²", "9" * 5000):
        with pytest.raises(ConfigError, match="give best, newest, or the number of a step"):
            checkpoint.find(tmp_path, which)


def table(rows: torch.Tensor) -> ShardedTensor:
    shards = [
        Shard(rows[start:end], ShardMetadata([start, 0], [end - start, rows.shape[1]], "rank:0/cpu"))
        for start, end in ((0, 7), (7, len(rows)))
    ]
    return ShardedTensor._init_from_local_shards(shards, *rows.shape)


def test_without_memory_for_copies_a_state_is_written_block_by_block_before_training_goes_on(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(checkpoint, "free_memory", lambda device, ranks: 100)
    monkeypatch.setattr(host_copies, "BLOCK_BYTES", 50)
    rows = torch.randn(20, 3, dtype=torch.float64)
    saved = tensors() | {"model.table": table(rows)}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.prepare(saved)
    assert "training stands still" in caplog.text
    checkpoints.begin(saved, state_of(3))
    assert checkpoints._writing is not None and checkpoints._writing.done()
    path = checkpoints.wait()
    assert path is not None
    chunks = dcp.FileSystemReader(path).read_metadata().state_dict_metadata["model.table"].chunks
    sizes = [tuple(chunk.sizes) for chunk in sorted(chunks, key=lambda chunk: chunk.offsets)]
    assert sizes == [(2, 3)] * 3 + [(1, 3)] + [(2, 3)] * 6 + [(1, 3)]
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    loaded["model.table"] = table(torch.zeros_like(rows))
    checkpoint.load(path, loaded)
    assert torch.equal(torch.cat([shard.tensor for shard in loaded["model.table"].local_shards()]), rows)
    assert all(torch.equal(loaded[name], saved[name]) for name in tensors())
