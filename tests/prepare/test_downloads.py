"""Inputs behind addresses: the same data as from local files, from a server and fsspec; what goes wrong."""

import gzip
import json
import socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import fsspec
import pyarrow.parquet as pq
import pytest
from fsspec.registry import known_implementations

from recsys.prepare import downloads
from tests.prepare.test_broken_inputs import PACKED, RANKING, RELEASE, RETRIEVAL, SEQUENCES, TEXT, TIMES, run
from tests.prepare.test_kuairand import ORIGINAL as KUAIRAND

CANDIDATES = b"who,sku\nu1,7\nu1,0\nu2,3\n"
FILES = {
    "/log.csv": TEXT,
    "/some%20l%C3%B6gs/log.csv.gz": PACKED,
    "/ml.zip": RELEASE,
    "/log.txt.gz": gzip.compress(SEQUENCES),
    "/times.txt": TIMES,
    "/candidates.csv": CANDIDATES,
    "/broken.csv": TEXT.replace(b"u1,", b",", 1),
}


class Handler(BaseHTTPRequestHandler):
    """Serves `FILES`; below /cut it promises 10 bytes more than it sends, /moved leads to the log."""

    def do_GET(self):
        path = self.path.partition("?")[0]
        if path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/log.csv")
            self.end_headers()
        elif path == "/private.csv":
            self.send_error(403)
        elif (content := FILES.get(path.removeprefix("/cut"))) is None:
            self.send_error(404)
        else:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content) + 10 * path.startswith("/cut")))
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, *arguments):
        """Stays quiet."""


@pytest.fixture(scope="module")
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


@pytest.fixture
def memory():
    """The file system `memory://`, emptied afterwards."""
    filesystem = fsspec.filesystem("memory")
    yield filesystem
    for name in ("/logs", "/kuairand"):
        if filesystem.exists(name):
            filesystem.rm(name, recursive=True)


def data_of(folder: Path) -> dict:
    """Everything in a data set, apart from the places of its files."""
    tables = {str(path.relative_to(folder)): pq.read_table(path) for path in folder.rglob("*.parquet")}
    return {**tables, "schema": json.loads((folder / "schema.json").read_text())}


def assert_same(capsys, folder: Path, tool: list[str], remote: list[str], local: dict[str, bytes]) -> None:
    """Compares what a tool makes of addresses with what it makes of files with the same content."""
    (folder / "remote").mkdir()
    assert run(capsys, folder / "remote", *tool, *remote) == (0, "")
    (folder / "local").mkdir()
    inputs = folder / "inputs"
    inputs.mkdir()
    flags = []
    for flag, (name, content) in zip(remote[::2], local.items(), strict=True):
        (inputs / name).write_bytes(content)
        flags += [flag, inputs / name]
    assert run(capsys, folder / "local", *tool, *flags) == (0, "")
    assert data_of(folder / "remote" / "made") == data_of(folder / "local" / "made")


def test_a_server_gives_the_data_of_a_local_file(server, tmp_path, capsys):
    address = f"{server}/some lögs/log.csv.gz?token=1"
    assert_same(capsys, tmp_path, ["csv", *RETRIEVAL], ["--input", address], {"log.csv.gz": PACKED})


def test_every_input_may_be_an_address(server, tmp_path, capsys):
    inputs = {
        "csv": (["--input", f"{server}/moved", "--candidates", f"{server}/candidates.csv"], RANKING),
        "sequences": (["--input", f"{server}/log.txt.gz", "--times", f"{server}/times.txt"], []),
        "movielens": (["--input", f"{server}/ml.zip"], []),
    }
    for tool, (remote, flags) in inputs.items():
        folder = tmp_path / tool
        folder.mkdir()
        local = {Path(address).name: FILES["/" + Path(address).name.replace("moved", "log.csv")]
                 for address in remote[1::2]}  # fmt: skip
        assert_same(capsys, folder, [tool, *flags], remote, local)


def test_a_folder_of_fsspec_gives_the_data_of_a_local_folder(memory, tmp_path, capsys):
    """Only files that the tool reads are taken; those of a log may stand in several files."""
    header, *lines = TEXT.splitlines(keepends=True)
    parts = {"a.csv": header + b"".join(lines[:30]), "b.csv": header + b"".join(lines[30:])}
    local = tmp_path / "logs"
    local.mkdir()
    for name, content in parts.items():
        memory.pipe_file(f"/logs/clicks/{name}", content)
        (local / name).write_bytes(content)
    memory.pipe_file("/logs/clicks/notes.txt", b"not a log")
    memory.pipe_file("/logs/clicks/deep/c.csv", b"not a log either")
    for name, source in (("remote", "memory://logs/clicks/"), ("local", local)):
        (tmp_path / name).mkdir()
        assert run(capsys, tmp_path / name, "csv", "--input", source, *RETRIEVAL) == (0, "")
    assert data_of(tmp_path / "remote" / "made") == data_of(tmp_path / "local" / "made")


def test_a_release_of_kuairand_behind_an_address(memory, tmp_path, capsys):
    for path in KUAIRAND.iterdir():
        memory.pipe_file(f"/kuairand/deep/{path.name}", path.read_bytes())
    memory.pipe_file("/kuairand/video_features_statistic_pure.csv", b"is not read, so not downloaded")
    for name, source in (("remote", "memory://kuairand"), ("local", KUAIRAND)):
        (tmp_path / name).mkdir()
        assert run(capsys, tmp_path / name, "kuairand", "--input", source, "--min-count", "1") == (0, "")
    assert data_of(tmp_path / "remote" / "made") == data_of(tmp_path / "local" / "made")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/none.csv", "/none.csv: no such file or folder (HTTP Error 404: Not Found); check the spelling"),
        ("/private.csv", "/private.csv: access is denied (HTTP Error 403: Forbidden); give an address that"),
        ("/cut/log.csv", f"/cut/log.csv: {len(TEXT):,} of {len(TEXT) + 10:,} bytes came before the connec"),
        ("/broken.csv", "/broken.csv, line 3: who is '', expected an id"),
    ],
    ids=["404", "403", "cut off", "bad line"],
)
def test_an_answer_that_is_no_log_is_named(server, tmp_path, capsys, path, message):
    code, said = run(capsys, tmp_path, "csv", "--input", server + path, *RETRIEVAL)
    assert code == 3 and server + message in said


def test_a_server_that_is_not_there_is_named(tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}/log.csv"
        code, said = run(capsys, tmp_path, "csv", "--input", address, *RETRIEVAL)
    assert code == 3 and f"{address}: cannot be read (" in said
    assert "Connection refused" in said and "check address and network" in said


def test_a_server_that_says_nothing_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(downloads, "TIMEOUT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/log.csv"
        code, said = run(capsys, tmp_path, "csv", "--input", address, *RETRIEVAL)
    assert code == 3 and f"{address}: cannot be read (timed out)" in said


@pytest.mark.parametrize(
    ("address", "code", "message"),
    [
        ("memory://logs/none.csv", 3, "memory://logs/none.csv: no such file or folder"),
        (
            "s33://logs/log.csv",
            3,
            "s33:// is not a known protocol. Did you mean s3://? Known protocols are https://,",
        ),
        ("nowhere://x/log.csv", 5, "(needs the moon); type: python -m pip install no_such_package\n"),
        ("http://", 3, "http://: cannot be read (no host given)"),
        ("http://[/log.csv", 3, "http://[/log.csv: cannot be read ("),
        ("http://host:port/log.csv", 3, "http://host:port/log.csv: cannot be read ("),
    ],
)
def test_an_address_that_leads_nowhere_is_named(tmp_path, capsys, monkeypatch, address, code, message):
    absent = {"class": "no_such_package.FileSystem", "err": "needs the moon"}
    monkeypatch.setitem(known_implementations, "nowhere", absent)
    for flags in (["--input", address], ["--input", "none.csv", "--candidates", address]):
        said = run(capsys, tmp_path, "csv", *flags, *RANKING)
        assert said[0] == code and message in said[1]


def test_a_folder_without_a_log_is_named(memory, tmp_path, capsys):
    memory.pipe_file("/logs/notes.txt", b"not a log")
    code, said = run(capsys, tmp_path, "csv", "--input", "memory://logs", *RETRIEVAL)
    assert code == 3 and "memory://logs: no file *.csv or *.tsv or " in said


def test_nothing_is_downloaded_for_an_output_that_cannot_be_made(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("recsys.prepare.command.download", None)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "x").touch()
    code, said = run(capsys, tmp_path, "csv", "--input", "memory://logs/log.csv", *RETRIEVAL)
    assert code == 2 and "made exists; give another --output" in said


def test_a_file_that_shrinks_while_it_comes_is_named(memory, tmp_path, capsys, monkeypatch):
    memory.pipe_file("/logs/log.csv", TEXT)
    monkeypatch.setattr(type(memory), "get_file", lambda self, path, target: Path(target).write_bytes(b"who"))
    code, said = run(capsys, tmp_path, "csv", "--input", "memory://logs/log.csv", *RETRIEVAL)
    assert code == 3 and f"memory://logs/log.csv: 3 of {len(TEXT):,} bytes came" in said
