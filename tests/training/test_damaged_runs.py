"""Damaged files of a run: each reader names the file and what is wrong in it."""

import copy
import json
import pickle
import random
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from recsys import files, typed_json
from recsys.data.counts import Counts
from recsys.data.sources.base import FileMark
from recsys.errors import RecsysError
from recsys.training import checkpoint
from recsys.training.checkpoint import Checkpoints
from recsys.training.hooks.metrics_file import read_metrics
from recsys.training.state import Best, Inputs, Progress, SavedState, capture_rng, restore_rng

WRONG = [None, True, 2**70, 1.5, float("inf"), float("nan"), "x", [], {}, [[]], {"a": 1}]
"""Values, one of which is wrong at any place of a JSON file."""

TEXTS = {
    "deep lists": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "nothing": b"",
    "no UTF-8": b"\xff\xfe{}",
    "UTF-16": '{"files": {}}'.encode("utf-16"),
    "null": b"null",
    "list": b"[]",
    "object": b"{}",
    "digits": b"1" * 10_000,
    "NaN": b"NaN",
    "zeros": bytes(100),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A state with every entry filled."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    progress = Progress(step=3, best=Best("auc", 0.5, 2))
    progress.window.add(0.25, {"click": 0.25}, Counts(1, 2, 3))
    inputs = Inputs([FileMark("a.parquet", 10, "f0")], {"item_id": "e1"}, "c2")
    state = SavedState(progress, [capture_rng(torch.device("cpu"))], inputs, "config", {"torch": "2"}, 1)
    tensors = {"model.weight": torch.randn(5, 3), "model.half": torch.randn(4).bfloat16()}
    yield Checkpoints(tmp_path_factory.mktemp("run")).save(tensors, state)
    dist.destroy_process_group()


@pytest.fixture
def damaged(saved, tmp_path):
    """Gives a function that writes one file of a copy of the state anew, under a manifest that fits."""

    def write(name: str, content: bytes) -> Path:
        for path in saved.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        (tmp_path / name).write_bytes(content)
        if name != files.MANIFEST:
            files.write_manifest(tmp_path)
        return tmp_path

    return write


def places(value, place=()):
    """Every place of a JSON value, lists by their first entries."""
    yield place
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value[:2] if isinstance(value, list) else ())
    )
    for name, inner in entries:
        yield from places(inner, (*place, name))


def changed(value, place, new):
    """The JSON value with another one at a place."""
    if not place:
        return new
    value = copy.deepcopy(value)
    inside = value
    for name in place[:-1]:
        inside = inside[name]
    inside[place[-1]] = new
    return value


def without(value, place):
    value = copy.deepcopy(value)
    inside = value
    for name in place[:-1]:
        inside = inside[name]
    del inside[place[-1]]
    return value


@pytest.mark.parametrize("text", TEXTS)
def test_a_manifest_that_is_none_is_a_fault(damaged, text):
    (fault,) = files.manifest_faults(damaged(files.MANIFEST, TEXTS[text]))
    assert "manifest.json: not a manifest (" in fault


@pytest.mark.parametrize("name", ["a\0b", "a" * 5000, "", "..", "\ud800"])
def test_a_manifest_with_an_odd_name_is_a_fault(damaged, name):
    entry = {"sha256": "0" * 64, "bytes": 1}
    assert files.manifest_faults(damaged(files.MANIFEST, json.dumps({"files": {name: entry}}).encode()))


def test_a_manifest_with_a_wrong_value_is_a_fault(saved, damaged):
    manifest = json.loads((saved / files.MANIFEST).read_text())
    for place in places(manifest):
        for wrong in WRONG:
            folder = damaged(files.MANIFEST, json.dumps(changed(manifest, place, wrong)).encode())
            # An empty list of files is whole, and so is a folder with more files than are listed.
            assert files.manifest_faults(folder) or (place, wrong) == (("files",), {})


@pytest.mark.parametrize("text", TEXTS)
def test_a_state_that_is_none_is_named(damaged, text):
    with pytest.raises(RecsysError, match=r"state\.json: "):
        checkpoint.read_state(damaged(checkpoint.STATE, TEXTS[text]))


def test_a_state_with_a_wrong_value_is_named(saved, tmp_path):
    state = json.loads((saved / checkpoint.STATE).read_text())
    # Their own test is about the states of generators, which are long.
    state["rng"] = [{}]
    spots = list(places(state))
    versions = [(changed(state, place, wrong), (place, wrong)) for place in spots for wrong in WRONG]
    versions += [(without(state, place), (place, "gone")) for place in spots if place]
    for version, case in versions:
        (tmp_path / checkpoint.STATE).write_text(json.dumps(version))
        try:
            read = checkpoint.read_state(tmp_path)
        except RecsysError as error:
            assert str(error).startswith(f"{tmp_path / checkpoint.STATE}: "), case
        else:
            # What is left out has its default, and all else fits the declared type.
            written = json.loads(json.dumps(read.to_json()))
            assert case[1] in ("gone", [], {}) or written == version, case


def test_states_of_older_versions_are_read(saved, damaged):
    state = json.loads((saved / checkpoint.STATE).read_text())
    del state["inputs"]["items"], state["progress"]["window"]["counts"]
    read = checkpoint.read_state(damaged(checkpoint.STATE, json.dumps(state).encode()))
    assert read.inputs.items is None and read.progress.window.counts == Counts()


def test_random_states_that_are_none_are_refused():
    state = json.loads(json.dumps(capture_rng(torch.device("cpu"))))
    before = random.getstate()
    for place in [
        (),
        *((name,) for name in state),
        ("python", 0),
        ("python", 1, 0),
        ("numpy", 0),
        ("numpy", 1),
    ]:
        for wrong in (None, -1, 2**70, "x", [], {}):
            try:
                restore_rng(changed(state, place, wrong), torch.device("cpu"))
            except ValueError as error:
                assert "not a saved state of random number generators" in str(error)
    restore_rng(state, torch.device("cpu"))
    assert random.getstate() == before


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_tensors_in_damaged_files_are_named_or_loaded(saved, damaged, name):
    clean = (saved / name).read_bytes()
    contents = [pickle.dumps(value) for value in (None, 1, "x", [], {})] if name == ".metadata" else []
    for seed in range(40):
        generator = random.Random(seed)
        content = bytearray(clean)
        for _ in range(generator.choice((1, 3, 30))):
            content[generator.randrange(len(content))] = generator.randrange(256)
        contents.append(bytes(content[: generator.randrange(len(content))] if seed % 4 == 0 else content))
    refused = 0
    for content in contents:
        folder = damaged(name, content)
        try:
            checkpoint.load(
                folder, {"model.weight": torch.zeros(5, 3), "model.half": torch.zeros(4).bfloat16()}
            )
        except RecsysError as error:
            refused += 1
            assert str(folder) in str(error)
    assert refused > len(contents) // 4


RECORDS = [
    {
        "kind": "train", "step": 1, "epoch": 0, "loss": 0.5, "losses": {"click": None}, "lr": {"dense": 0.1},
        "grad_norm": 1.0, "samples_per_s": 10.0, "tokens_per_s": 5, "mfu": None, "data_wait": 0.5,
    },
    {"kind": "evaluation", "step": 1, "metrics": {"auc": 0.5, "loss": None}, "best": True, "seconds": 0.1},
    {
        "kind": "diagnostics", "step": 1,
        "slices": [{"history": [0, 5], "rows": 3, "candidates": 4, "metrics": {"auc": 0.5}}],
        "calibration": {"click": [{"candidates": 3, "predicted": 0.5, "observed": None}]},
    },
]  # fmt: skip


def as_lines(*records) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def test_metrics_come_back_as_written_without_a_line_that_was_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(as_lines(*RECORDS) + b'{"kind": "train", "st')
    assert json.loads(json.dumps(read_metrics(path))) == RECORDS


@pytest.mark.parametrize("kind", range(3), ids=[record["kind"] for record in RECORDS])
def test_a_wrong_value_among_the_metrics_is_named(tmp_path, kind):
    path = tmp_path / "metrics.jsonl"
    optional = {"epoch", "seconds"}
    for place in places(RECORDS[kind]):
        for wrong in WRONG:
            if set(place) & optional and wrong not in (float("inf"),):
                continue
            record = changed(RECORDS[kind], place, wrong)
            path.write_bytes(as_lines(RECORDS[0], record, RECORDS[1]))
            try:
                read = read_metrics(path)
            except RecsysError as error:
                assert str(error).startswith(f"{path}, line 2: damaged ("), (place, wrong)
            else:
                assert json.loads(json.dumps(read[1])) == record


@pytest.mark.parametrize("text", [text for text in TEXTS if text != "nothing"])
def test_a_line_of_metrics_that_is_none_is_named(tmp_path, text):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(TEXTS[text].replace(b"\n", b" ") + b"\n" + as_lines(*RECORDS))
    with pytest.raises(RecsysError, match=r"metrics\.jsonl, line 1: damaged \("):
        read_metrics(path)


def test_json_is_read_into_what_a_dataclass_declares():
    mark = FileMark("a", 3, "b")
    assert typed_json.parse(json.dumps(asdict(mark)), FileMark) == mark
    assert typed_json.parse("[1, 2]", Counts) == Counts(1, 2, 0)
    for text, message in (
        ('{"path": "a", "size": 3}', "fingerprint is missing"),
        ('{"path": "a", "size": 3, "fingerprint": "b", "more": 1}', "more is not known"),
        ('{"path": "a", "size": true, "fingerprint": "b"}', "size is 'True', expected an integer"),
        ('{"path": "a", "size": 3.0, "fingerprint": "b"}', r"size is '3\.0', expected an integer"),
        ('{"path": 1, "size": 3, "fingerprint": "b"}', "path is '1', expected a text"),
    ):
        with pytest.raises(TypeError, match=message):
            typed_json.parse(text, FileMark)
    with pytest.raises(TypeError, match="it has 5 entries, at most 4"):
        typed_json.parse("[1, 2, 3, 4, 5]", Counts)
