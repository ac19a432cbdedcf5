"""Folders are whole or absent, and a manifest finds changes."""

import hashlib
import subprocess
import sys

import pytest

from recsys import files
from recsys.errors import RecsysError


def test_a_folder_appears_only_when_its_block_succeeds(tmp_path):
    target = tmp_path / "result"
    with pytest.raises(RuntimeError, match="half way"), files.whole_folder(target) as aside:
        (aside / "a").write_text("a")
        raise RuntimeError("half way")
    assert list(tmp_path.iterdir()) == []
    for text in ("first", "second"):
        with files.whole_folder(target) as aside:
            (aside / "a").write_text(text)
            assert not target.exists() or (target / "a").read_text() == "first"
    assert (target / "a").read_text() == "second"
    assert list(tmp_path.iterdir()) == [target]


def test_a_killed_writer_leaves_nothing_under_the_name(tmp_path):
    code = (
        "import os, signal, sys, pathlib; from recsys import files\n"
        "with files.whole_folder(pathlib.Path(sys.argv[1])) as aside:\n"
        "    (aside / 'a').write_text('a'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "result")], check=False)
    assert not (tmp_path / "result").exists()
    with files.whole_folder(tmp_path / "result") as aside:
        (aside / "b").write_text("b")
    assert [p.name for p in (tmp_path / "result").iterdir()] == ["b"]


def test_two_writers_do_not_share_a_folder(tmp_path):
    target = tmp_path / "result"
    with files.whole_folder(target) as aside:
        (aside / "a").write_text("a")
        with pytest.raises(RecsysError, match="another process is writing this folder; wait for it"):
            with files.whole_folder(target):
                raise AssertionError("two at once")
        assert (aside / "a").read_text() == "a"
    assert [p.name for p in tmp_path.iterdir()] == ["result"]
    with files.whole_folder(target) as aside:
        assert list(aside.iterdir()) == []


def test_sha256_is_the_librarys(tmp_path):
    data = bytes(range(256)) * 9000
    (tmp_path / "x").write_bytes(data)
    assert files.sha256(tmp_path / "x") == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("fault", ["flip", "cut", "gone", "no manifest", "broken manifest"])
def test_a_manifest_names_the_file_that_changed(tmp_path, fault):
    (tmp_path / "sub").mkdir()
    path = tmp_path / "sub" / "data"
    path.write_bytes(b"some bytes")
    files.write_manifest(tmp_path)
    assert files.manifest_faults(tmp_path) == []
    manifest = tmp_path / files.MANIFEST
    if fault == "flip":
        path.write_bytes(b"some bytez")
    elif fault == "cut":
        path.write_bytes(b"some")
    elif fault == "gone":
        path.unlink()
    elif fault == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text(manifest.read_text()[:20])
    (finding,) = files.manifest_faults(tmp_path)
    assert str(manifest if "manifest" in fault else path) in finding


def test_a_lock_is_one_processes_and_ends_with_it(tmp_path):
    lock = tmp_path / ".lock"
    code = (
        "import pathlib, sys; from recsys import files\n"
        "with files.locked(pathlib.Path(sys.argv[1])) as taken:\n"
        "    print(taken, flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "True\n"
        with files.locked(lock) as taken:
            assert not taken
        holder.kill()
    with files.locked(lock) as taken, files.locked(lock) as again:
        assert taken and not again


def test_files_that_a_manifest_does_not_know_are_somebody_elses(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "data").write_bytes(b"x")
    assert files.not_in_manifest(tmp_path) == [tmp_path / "sub" / "data"]
    files.write_manifest(tmp_path)
    assert files.not_in_manifest(tmp_path) == []
    (tmp_path / "sub" / "notes").write_bytes(b"mine")
    (tmp_path / "link").symlink_to(tmp_path / "sub", target_is_directory=False)
    assert tmp_path / "sub" / "notes" in files.not_in_manifest(tmp_path)
    (tmp_path / files.MANIFEST).write_text("{", encoding="utf-8")
    assert tmp_path / "sub" / "data" in files.not_in_manifest(tmp_path)


def test_a_full_disk_is_named(tmp_path):
    where = tmp_path / "not" / "there"
    said = rf"^no space left on {where} \(.*No space left on device\): [\d,]+ bytes are free"
    with (
        pytest.raises(RecsysError, match=said),
        files.naming_full_disk(where),
        open("/dev/full", "w") as full,
    ):
        full.write("x")
    with pytest.raises(FileNotFoundError), files.naming_full_disk(where):
        where.read_text()


def test_a_text_that_cannot_take_its_place_leaves_nothing_behind(tmp_path):
    (tmp_path / "a.json").mkdir()
    with pytest.raises(IsADirectoryError):
        files.write_text(tmp_path / "a.json", "{}")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_folder_takes_the_place_of_a_file(tmp_path):
    for name in ("state", ".state.old"):
        (tmp_path / name).write_text("in the way")
    (tmp_path / "aside").mkdir()
    files.publish(tmp_path / "aside", tmp_path / "state")
    assert [path.name for path in tmp_path.iterdir()] == ["state"] and (tmp_path / "state").is_dir()
