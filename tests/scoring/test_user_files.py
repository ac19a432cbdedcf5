"""`UserFiles`: users come back bit for bit, or not at all."""

import os
import random
from pathlib import Path

import pytest
import torch

from recsys.scoring.cached_signature import CacheSpec
from recsys.scoring.prefill import CachedModel
from recsys.scoring.user_files import ENDING, UserFiles
from recsys.scoring.user_store import StoredUser, UserStore
from tests.modules.pipelines import RANKER, batch_of, pipeline_of, random_rows
from tests.scoring.test_prefill import HYBRID, SIZES, build

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def encoded():
    """A spec, and users with their exact tensors: keys and values, states, times, and no tokens at all."""
    pipeline = pipeline_of(RANKER, HYBRID)
    model, rows = build(pipeline), random_rows(pipeline, SIZES)
    with torch.no_grad():
        caches = [CachedModel(model).prefill(batch_of(pipeline, [row])) for row in rows]
    users = [
        StoredUser(os.urandom(16), len(row.uih_timestamps), c) for row, c in zip(rows, caches, strict=True)
    ]
    return CacheSpec.of(model), users


def assert_equal(spec: CacheSpec, actual: StoredUser, expected: StoredUser) -> None:
    assert (actual.digest, actual.num_events) == (expected.digest, expected.num_events)
    pairs = zip(spec.flatten(actual.cache), spec.flatten(expected.cache), strict=True)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
    for stacks in zip(actual.cache.mixer.stacks, expected.cache.mixer.stacks, strict=True):
        for got, want in zip(*stacks, strict=True):
            if hasattr(want, "layout"):
                assert got.layout.lengths.tolist() == want.layout.lengths.tolist()
            else:
                assert torch.equal(got.past.lengths, want.past.lengths)


def test_users_come_back_in_a_later_process_and_least_recently_used_ones_leave(tmp_path, encoded):
    spec, users = encoded
    store = UserStore(CPU, 0, files=UserFiles(tmp_path, 10**9, b"weights", spec))
    for key, user in enumerate(users):
        store.put(key, user)
    sizes = list(store._tiers[-1]._sizes.values())
    assert_equal(spec, store.get(0), users[0])  # now the most recently used one
    (tmp_path / "notes.txt").write_text("not of the store")
    later = UserFiles(tmp_path, sum(sizes) - sizes[1], b"weights", spec)
    store = UserStore(CPU, 0, files=later)
    assert store.num_bytes == sum(sizes) == sum(path.stat().st_size for path in tmp_path.glob("*.user"))
    store.put("new", users[1])  # of the same size as the user 1, who leaves with the next one or alone
    assert store.get(1) is None and store.num_bytes <= sum(sizes) - sizes[1]
    for key in (0, 6, 5):
        assert_equal(spec, store.get(key), users[key])
    assert_equal(spec, store.get("new"), users[1])
    assert (tmp_path / "notes.txt").exists()


def test_wrong_versions_keys_and_bits_are_misses(tmp_path, encoded):
    spec, users = encoded
    files = UserFiles(tmp_path, 10**9, b"weights", spec)
    files.add(7, users[0])
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()

    def answer(version: bytes, key: object, given: bytes) -> StoredUser | None:
        for old in tmp_path.iterdir():
            old.unlink()
        opened = UserFiles(tmp_path, 10**9, version, spec)
        name = opened._name(key)
        (tmp_path / name).write_bytes(given)  # even under the right name
        return UserFiles(tmp_path, 10**9, version, spec).pop(key)

    assert_equal(spec, answer(b"weights", 7, content), users[0])
    assert not list(tmp_path.glob(f"*{ENDING}"))
    draw = random.Random(0)
    for _ in range(40):
        place = draw.randrange(len(content))
        damaged = bytearray(content)
        damaged[place] ^= 1 << draw.randrange(8)
        assert answer(b"weights", 7, bytes(damaged)) is None
        assert answer(b"weights", 7, content[:place]) is None
    for version, key in ((b"other weights", 7), (b"weights", 8), (b"weights", "7")):
        assert answer(version, key, content) is None


def test_a_disk_that_cannot_be_written_keeps_nobody_and_says_so_once(tmp_path, encoded, monkeypatch, caplog):
    spec, users = encoded
    files = UserFiles(tmp_path / "users", 10**9, b"weights", spec)

    def full(path: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    for key in range(2):
        assert files.add(key, users[key]) == [] and files.pop(key) is None
    assert files.num_bytes == len(files) == 0
    assert caplog.text.count("users cannot be stored in") == 1
