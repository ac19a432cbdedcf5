"""`recsys.serve` as a process of its own, asked over HTTP: answers are those of `recsys.predict`, and nothing
that a client sends, or a reload, or SIGTERM, costs another client its answer."""

import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys import files
from tests.integration.runs import ROOT, command, finish, wait_for
from tests.tools import forks
from tests.tools.arrow_streams import stream_of
from tests.tools.forks import start_command

ARROW = {"Content-Type": "application/vnd.apache.arrow.stream"}
TOKEN = "a-secret-of-forty-characters-or-so-123456"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


@contextmanager
def serving(package, *flags, code=0, alone=False, **options):
    """A server and a client of it; at the end SIGTERM, after which it must exit with `code`.

    Answers may take long, since other tests use the cores as well.

    Args:
        package: the package.
        *flags: flags of the command, in place of the usual ones.
        code: the exit code.
        alone: the server's processes that score are forked from a server of its own, as a user's are. It
            spends seconds on imports, so most tests share one.
        **options: of `start_command`.
    """
    usual = ("--package", package, "--port", 0, "--deadline-ms", 30_000)
    forking = None if alone else forks.server().pid
    before = children(*servers(forking)) if forking else []
    process = start_command("serve", *usual, *flags, shares_scoring_server=not alone, **options)
    scoring = lambda: [pid for pid in children(*servers(forking or process.pid)) if pid not in before]  # noqa: E731
    try:
        wait_for(lambda: '"listening"' in process.output(), process)
        line = next(line for line in process.output().splitlines() if '"listening"' in line)
        port = json.loads(line)["port"]
        limits = httpx.Limits(max_connections=200)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, limits=limits) as client:
            yield SimpleNamespace(process=process, client=client, port=port, scoring=scoring)
        process.send_signal(signal.SIGTERM)
        finish(process, code)
    finally:
        process.kill()


def said_by_serve(*flags, code=0) -> str:
    """Runs the command in a fork that loads packages without imports, and returns the printed text."""
    return finish(start_command("serve", *flags, "--port", 0, shares_scoring_server=True), code)


def rows_for(client: httpx.Client, rows: list[dict]) -> list[dict]:
    """The fields of rows that the server's OpenAPI document names."""
    fields = client.get("/openapi.json").json()["components"]["schemas"]["Row"]["properties"]
    return [{name: value for name, value in row.items() if name in fields} for row in rows]


def asked_by_stream(client: httpx.Client, rows: list[dict], path: str = "/score") -> httpx.Response:
    """The answer to rows that are sent as an Arrow stream, in two batches."""
    return client.post(path, content=stream_of(pa.Table.from_pylist(rows), 1 + len(rows) // 2), headers=ARROW)


def predicted(exported, folder, count: int) -> SimpleNamespace:
    """Rows of an exported model's input, and what `recsys predict` writes for them."""
    table = pq.read_table(exported.rows).slice(0, count)
    pq.write_table(table, folder / "rows.parquet")
    flags = ("--package", exported.package, "--input", folder / "rows.parquet", "--output", folder / "out")
    command("predict", *flags, cwd=folder)
    return SimpleNamespace(rows=table.to_pylist(), answers=pq.read_table(folder / "out").to_pylist())


def same(rows: list[dict], expected: list[dict]) -> bool:
    """Equal rows; scores to 1e-6, since sums may be divided in another way in a batch of another size.

    A watch time is e^x - 1 of what the model computes, and x is compared.
    """
    for ours, theirs in zip(rows, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            is_score = isinstance(value, list) and value and isinstance(value[0], float)
            given, wanted = ours[name], value
            if name == "watch_time":
                given, wanted = [math.log1p(time) for time in given], [math.log1p(time) for time in wanted]
            assert given == (pytest.approx(wanted, abs=1e-6, rel=1e-6) if is_score else wanted)
    return True


def children(*processes: int) -> list[int]:
    """The children of processes, whichever thread has started them."""
    folders = [Path(f"/proc/{process}/task") for process in processes]
    lists = [path.read_text().split() for folder in folders for path in folder.glob("*/children")]
    return [int(child) for listed in lists for child in listed]


def servers(process: int) -> list[int]:
    """The child of a process from which processes that score are forked; empty before it is started."""
    command = lambda child: Path(f"/proc/{child}/cmdline").read_bytes()  # noqa: E731
    return [child for child in children(process) if b"multiprocessing.forkserver" in command(child)]


def wait_until(condition) -> None:
    """Returns as soon as a condition holds that needs no running process."""
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


def resident_bytes(process: int) -> int:
    """The resident memory of a process."""
    return 1024 * int(Path(f"/proc/{process}/status").read_text().split("VmRSS:")[1].split()[0])


@pytest.fixture(scope="module")
def packages(ranker, tmp_path_factory):
    """A folder with a package, a newer one, and one with a damaged file."""
    folder = tmp_path_factory.mktemp("packages")
    for name in ("first", "second", "broken"):
        shutil.copytree(ranker.package, folder / name)
    newer = folder / "second" / "package.json"
    newer.write_text(json.dumps(json.loads(newer.read_text()) | {"step": 41}))
    files.write_manifest(folder / "second")
    vocabulary = next((folder / "broken" / "vocabulary").iterdir())
    vocabulary.write_bytes(vocabulary.read_bytes()[:-1] + b"x")
    return folder


@pytest.fixture(scope="module")
def expected(ranker, tmp_path_factory):
    return predicted(ranker, tmp_path_factory.mktemp("predicted"), 40)


@pytest.fixture(scope="module")
def server(packages):
    flags = ("--token-env", "THE_TOKEN", "--max-rows", 40, "--max-history", 500, "--max-candidates", 50)
    more = ("--max-body-mib", 1, "--processes", 2)
    with serving(packages / "first", *flags, *more, THE_TOKEN=TOKEN) as running:
        running.client.headers.update(BEARER)
        yield running
    assert TOKEN not in running.process.output()


@pytest.fixture(scope="module")
def rows(server, expected):
    return rows_for(server.client, expected.rows)


def test_scores_are_those_of_predict_for_one_client_and_for_many(server, rows, expected):
    whole = server.client.post("/score", json={"rows": rows})
    assert whole.status_code == 200 and same(whole.json()["rows"], expected.answers)
    with ThreadPoolExecutor(10) as threads:
        posted = threads.map(lambda row: server.client.post("/score", json={"rows": [row]}), rows)
        alone = [answer.json()["rows"][0] for answer in posted]
    assert same(alone, expected.answers)
    # Some of them were scored together.
    text = server.client.get("/metrics").text
    assert 'recsys_requests_total{route="/score",status="200"}' in text
    batches = float(text.split("recsys_batch_rows_count ")[1].split()[0])
    assert batches < 1 + len(rows)
    for stage in ("convert", "score"):
        assert f'recsys_batch_seconds_count{{stage="{stage}"}} {batches}' in text
    resident = float(text.split('recsys_scoring_resident_memory_bytes{package="A"} ')[1].split()[0])
    assert resident == pytest.approx(sum(map(resident_bytes, server.scoring())), rel=0.1)


def test_rows_may_come_as_an_arrow_stream(server, rows, expected):
    for given in (rows, rows[3:4]):
        answer = asked_by_stream(server.client, given)
        posted = server.client.post("/score", json={"rows": given})
        assert answer.status_code == 200 and answer.json().keys() == posted.json().keys()
        assert same(answer.json()["rows"], posted.json()["rows"])
    described = server.client.get("/openapi.json").json()["paths"]["/score"]["post"]
    assert ARROW["Content-Type"] in described["requestBody"]["content"] and "parameters" not in described
    without = [{name: value for name, value in row.items() if name != "user_id"} for row in rows]
    assert asked_by_stream(server.client, without).json()["rows"][0]["user_id"] is None
    # As a file, it has columns in any order, of any integers and numbers.
    small = pa.Table.from_pylist(rows[:2]).select(sorted(rows[0]))
    for name, kind in (("hour", pa.int8()), ("uih_duration", pa.large_list(pa.float32()))):
        place = small.column_names.index(name)
        small = small.set_column(place, name, small[name].cast(kind))
    answer = server.client.post("/score", content=stream_of(small), headers=ARROW)
    assert same(answer.json()["rows"], expected.answers[:2])
    long = len(rows[0]["uih_duration"])
    for name, value, told in (
        ("hour", None, "hour is null"),
        ("uih_duration", None, "uih_duration is null. An empty list is written []"),
        ("uih_duration", [1.0] * (long - 1) + [None], f"uih_duration[{long - 1}] is null"),
        ("uih_duration", [float("nan")] * long, "uih_duration[0] is nan"),
        ("uih_duration", [], "uih_duration has 0 items"),
        ("uih_item_id", [-1] * long, "uih_item_id[0] is -1"),
    ):
        refused = asked_by_stream(server.client, [rows[0], rows[0] | {name: value}])
        (finding,) = refused.json()["findings"]
        assert refused.status_code == 422 and finding["field"] == "rows[1]"
        assert finding["message"].startswith(told)


def test_a_damaged_stream_is_answered_and_costs_nothing_else(server, rows):
    draw, whole = random.Random(0), stream_of(pa.Table.from_pylist(rows[:2]))
    statuses = set()
    for _ in range(60):
        body = bytearray(whole)
        for _ in range(draw.choice((1, 4))):
            body[draw.randrange(len(body))] = draw.randrange(256)
        statuses.add(server.client.post("/score", content=bytes(body), headers=ARROW).status_code)
    assert statuses == {200, 400, 422}
    for body, status in ((b"", 400), (b'{"rows": []}', 400), (whole[:900], 400)):
        answer = server.client.post("/score", content=body, headers=ARROW)
        assert answer.status_code == status and "Arrow IPC stream" in answer.json()["error"]
    assert server.client.post("/score", content=b" " * (1 << 21), headers=ARROW).status_code == 413
    # Other types of bodies are JSON.
    answer = server.client.post("/score", content=whole, headers={"Content-Type": "application/x-arrow"})
    assert answer.status_code == 400 and "not valid JSON" in answer.json()["error"]


def test_recommendations_are_those_of_predict(retriever, tmp_path):
    wanted = predicted(retriever, tmp_path, 12)
    with serving(retriever.package) as running:
        asked = rows_for(running.client, wanted.rows)
        rows = running.client.post("/recommend", json={"rows": asked}).json()["rows"]
        assert same(rows, wanted.answers)
        # Requests with another k, at the same time.
        with ThreadPoolExecutor(6) as threads:
            ask = lambda k: running.client.post("/recommend", json={"rows": asked, "k": k})  # noqa: E731
            answers = list(threads.map(ask, range(1, 7)))
        for k, answer in enumerate(answers, 1):
            cut = [row | {name: row[name][:k] for name in ("item_id", "score")} for row in wanted.answers]
            assert same(answer.json()["rows"], cut)
        for k in (0, 10**6, 2.5, "3", True):
            refused = running.client.post("/recommend", json={"rows": asked, "k": k})
            assert refused.status_code == 422 and refused.json()["findings"][0]["field"] == "k"
        assert running.client.post("/score", json={"rows": asked}).status_code == 404
        assert same(asked_by_stream(running.client, asked, "/recommend?k=4").json()["rows"], [
            row | {name: row[name][:4] for name in ("item_id", "score")} for row in wanted.answers
        ])  # fmt: skip
        assert same(asked_by_stream(running.client, asked, "/recommend").json()["rows"], wanted.answers)
        for k in (0, 10**6, "2.5", "", "\u0663", -1):
            refused = asked_by_stream(running.client, asked, f"/recommend?k={k}")
            assert refused.status_code == 422 and refused.json()["findings"][0]["field"] == "k"
        # Without a token there is no reload.
        assert running.client.post("/reload").status_code == 403


def test_unknown_ids_are_scored_as_predict_scores_them(server, rows, ranker, tmp_path):
    schema = pq.read_schema(ranker.rows)
    strange = [row | {"candidate_item_id": [10**15 + i for i, _ in enumerate(row["candidate_item_id"])]}
               for row in pq.read_table(ranker.rows).slice(0, 3).to_pylist()]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(strange, schema), tmp_path / "strange.parquet")
    wanted = predicted(
        SimpleNamespace(rows=tmp_path / "strange.parquet", package=ranker.package), tmp_path, 3
    )
    asked = rows_for(server.client, strange)
    assert same(server.client.post("/score", json={"rows": asked}).json()["rows"], wanted.answers)


def change(row: dict, name: str, value: object) -> str:
    return json.dumps({"rows": [row, row | {name: value}]})


@pytest.mark.parametrize(
    ("name", "value", "field", "message"),
    [
        ("hour", "8", "rows[1].hour", "valid integer"),
        ("hour", None, "rows[1].hour", "valid integer"),
        ("hour", True, "rows[1].hour", "valid integer"),
        ("hour", 2**64, "rows[1].hour", "less than or equal"),
        ("hour", float("nan"), "rows[1].hour", "valid integer"),
        ("request_time", 1.5, "rows[1].request_time", "valid integer"),
        ("candidate_item_id", [1, "2"], "rows[1].candidate_item_id[1]", "valid integer"),
        ("candidate_item_id", 7, "rows[1].candidate_item_id", "valid array"),
        ("candidate_item_id", [1] * 51, "rows[1].candidate_item_id", "at most 50"),
        ("uih_item_id", [1] * 501, "rows[1].uih_item_id", "at most 500"),
        ("hours", 3, "rows[1].hours", "not permitted"),
        (
            "request_time",
            1_700_000_000_000,
            "rows[1]",
            "request_time is 1700000000000, which loo",
        ),
        ("request_time", -5, "rows[1]", "request_time is -5; times are 0 or larger"),
        ("uih_timestamps", [3, 2], "rows[1]", "uih_timestamps"),
    ],
)
def test_a_bad_row_is_told_by_field_and_row(server, rows, name, value, field, message):
    answer = server.client.post("/score", content=change(rows[0], name, value))
    assert answer.status_code == 422, answer.text
    finding = answer.json()["findings"][0]
    assert finding["field"] == field and message in finding["message"]
    if field == "rows[1]":
        by_stream = asked_by_stream(server.client, [rows[0], rows[0] | {name: value}])
        assert (by_stream.status_code, by_stream.json()) == (422, answer.json())
    assert "bad_rows" not in answer.text and "Correct the file" not in answer.text


def test_a_bad_row_spares_the_requests_of_its_batch(packages, rows, expected):
    # Four rows fill a batch, so these are scored together as soon as the last one has come.
    patient = ("--max-wait-ms", 20_000, "--deadline-ms", 60_000)
    with serving(packages / "first", *patient, "--max-batch", 4) as running:
        bad = rows[2] | {"request_time": -5}
        by_json = lambda *given: running.client.post("/score", json={"rows": given})  # noqa: E731
        by_stream = lambda *given: asked_by_stream(running.client, given)  # noqa: E731
        with ThreadPoolExecutor(3) as threads:
            first = threads.submit(by_stream, rows[0])
            second = threads.submit(by_stream, rows[1], bad)
            third = threads.submit(by_json, rows[3])
        first, second, third = (future.result() for future in (first, second, third))
        # They were scored in one batch, in spite of the bad row.
        assert "requests failed" not in running.process.output()
        text = running.client.get("/metrics").text
        assert "recsys_batch_rows_count 1.0" in text and "recsys_batch_rows_sum 4.0" in text
    assert same([answer.json()["rows"][0] for answer in (first, third)], expected.answers[:4:3])
    assert second.status_code == 422
    (finding,) = second.json()["findings"]
    assert finding["field"] == "rows[1]" and finding["message"].startswith("request_time is -5;")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b'{"rows": [', 400),
        (b"\xff\xfe", 400),
        (b"[" * 100_000, 400),
        (b'{"rows": ' + b'{"a":' * 100_000, 400),
        (b'{"rows": [' + b"[" * 5_000 + b"]" * 5_000 + b"]}", 400),
        (b"null", 422),
        (b'{"rows": []}', 422),
        (b'{"rows": {}}', 422),
        (b'{"rows": [1, null, "x", []]}', 422),
        (b'{"rows": [{}], "k": 3}', 422),
        (b'{"rows": [' + b"{}," * 40 + b"{}]}", 422),
        (b'{"rows": [{"hour": ' + b"9" * 5_000 + b"}]}", 400),
        (b'{"rows": [{"hour": "\\ud800"}]}', 400),
    ],
)
def test_a_body_that_is_no_request_is_refused(server, body, status):
    answer = server.client.post("/score", content=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"] and len(answer.content) < 10_000
    assert server.client.get("/healthz").status_code == 200


def test_a_large_body_is_refused_by_its_header_and_as_it_comes(server):
    assert server.client.post("/score", content=b" " * (1 << 21)).status_code == 413
    pieces = (b" " * (1 << 16) for _ in range(100))
    try:
        assert server.client.post("/score", content=pieces).status_code == 413
    except (httpx.WriteError, httpx.ReadError):
        # The server closes the connection while the client still writes.
        pass
    lines = "POST /score HTTP/1.1", "Host: x", f"Authorization: Bearer {TOKEN}", f"Content-Length: {10**13}"
    head = "\r\n".join([*lines, "", ""])
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413")
    packed = server.client.post("/score", content=b"x", headers={"Content-Encoding": "gzip"})
    assert packed.status_code == 415
    assert server.client.get("/readyz").status_code == 200


@pytest.mark.parametrize("given", [None, "", "Bearer", f"Bearer {TOKEN}x", f"Basic {TOKEN}", "Bearer \xe9"])
@pytest.mark.parametrize("path", ["/score", "/reload", "/metrics", "/openapi.json", "/nowhere"])
def test_without_the_token_nothing_is_told(server, given, path):
    headers = {} if given is None else {"Authorization": given.encode("latin-1")}
    answer = httpx.post(f"http://127.0.0.1:{server.port}{path}", headers=headers, content=b"{}")
    assert answer.status_code == 401 and answer.headers["WWW-Authenticate"] == "Bearer"


def test_health_needs_no_token_and_logs_are_json(server):
    for path in ("/healthz", "/readyz"):
        assert httpx.get(f"http://127.0.0.1:{server.port}{path}").status_code == 200
    asked = server.client.get("/metrics", headers={"X-Request-ID": "mine-7"})
    assert asked.headers["X-Request-ID"] == "mine-7"
    assert server.client.get("/metrics", headers={"X-Request-ID": 'a"b'}).headers["X-Request-ID"] != 'a"b'
    # The line is written when the answer is on its way.
    wait_for(lambda: "mine-7" in server.process.output(), server.process)
    lines = [json.loads(line) for line in server.process.output().splitlines()]
    # Imports of a fork may have left a second handler, so a line may come twice.
    line, *_ = [line for line in lines if line.get("request_id") == "mine-7"]
    assert (line["route"], line["status"], line["level"]) == ("/metrics", 200, "info")


def test_a_broken_package_leaves_the_old_one_and_a_new_one_takes_over_without_a_lost_request(
    server, rows, expected, packages
):
    before = server.client.get("/readyz").json()["model"]
    for name, reason in (
        ("broken", "vocabulary"),
        ("none", "no package"),
        ("../first", "not a path"),
        ("", "not"),
    ):
        answer = server.client.post("/reload", json={"package": name})
        assert answer.status_code == 409 and reason in answer.json()["error"], answer.text
        assert before in answer.json()["error"]
    assert server.client.post("/reload", json={"pakage": "second"}).status_code == 422
    assert server.client.get("/readyz").json()["model"] == before
    assert len(server.scoring()) == 2
    done, answers = threading.Event(), []

    def ask(thread: int) -> None:
        number = thread
        while not done.is_set():
            place = number % len(rows)
            answers.append((place, server.client.post("/score", json={"rows": [rows[place]]})))
            number += 4

    threads = [threading.Thread(target=ask, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    try:
        loaded = server.client.post("/reload", json={"package": "second"})
        # Loading has ended; the new one answers a few.
        until = time.monotonic() + 30
        while answers[-1][1].json().get("model") == before and time.monotonic() < until:
            time.sleep(0.05)
    finally:
        done.set()
        for thread in threads:
            thread.join(30)
    after = loaded.json()["model"]
    assert loaded.status_code == 200 and after.startswith("step-41-")
    assert {answer.status_code for _, answer in answers} == {200}
    assert {answer.json()["model"] for _, answer in answers} == {before, after}
    for place, answer in answers:
        assert same(answer.json()["rows"], [expected.answers[place]])
    text = server.client.get("/metrics").text
    assert f'recsys_model_info{{package="A",version="{after}"}} 1.0' in text and before not in text
    wait_for(lambda: len(server.scoring()) == 2, server.process)


def test_overload_is_answered_and_sigterm_loses_nothing(packages, rows, expected):
    # Whatever comes waits half a second, so that what happens does not depend on the machine's speed.
    patient = ("--max-wait-ms", 500, "--deadline-ms", 30_000)
    with serving(packages / "first", *patient, "--max-queue", 4) as running:
        ask = lambda i: running.client.post("/score", json={"rows": [rows[i]]})  # noqa: E731
        with ThreadPoolExecutor(40) as threads:
            answers = list(threads.map(ask, range(40)))
        counts = Counter(answer.status_code for answer in answers)
        assert set(counts) == {200, 503} and counts[200] >= 4 and counts.total() == 40
        for place, answer in enumerate(answers):
            if answer.status_code == 200:
                assert same(answer.json()["rows"], [expected.answers[place]])
            else:
                assert answer.headers["Retry-After"] == "1" and "ask again later" in answer.json()["error"]
        with ThreadPoolExecutor(4) as threads:
            coming = [threads.submit(ask, i) for i in range(4)]
            queued = lambda: "recsys_queue_rows 4.0" in running.client.get("/metrics").text  # noqa: E731
            wait_for(queued, running.process)
            running.process.send_signal(signal.SIGTERM)
            last = [future.result(30) for future in coming]
        assert same([answer.json()["rows"][0] for answer in last], expected.answers[:4])
        assert "stopped" in finish(running.process)


def ask_and_wait(running, rows) -> list:
    """Asks about each row alone while the process that scores is stopped; returns futures of the answers."""
    threads = ThreadPoolExecutor(len(rows))
    post = lambda row: running.client.post("/score", json={"rows": [row]})  # noqa: E731
    asked = [threads.submit(post, row) for row in rows]
    # The first one is with the process, and the others wait.
    queued = f"recsys_queue_rows {len(rows) - 1}.0"
    wait_for(lambda: queued in running.client.get("/metrics").text, running.process)
    threads.shutdown(wait=False)
    return asked


def test_a_killed_process_ends_the_server_and_requests_are_told_so(packages, rows):
    flags = ("--max-wait-ms", 0, "--max-batch", 1, "--deadline-ms", 60_000)
    with serving(packages / "first", *flags, code=1) as running:
        (process,) = running.scoring()
        os.kill(process, signal.SIGSTOP)
        asked = ask_and_wait(running, rows[:3])
        os.kill(process, signal.SIGKILL)
        for future in asked:
            answer = future.result(30)
            assert answer.status_code == 503 and answer.headers["Retry-After"] == "1"
            assert "a process that scores has ended; ask again later" in answer.json()["error"]
        said = finish(running.process, 1)
    assert f"{packages / 'first'}: the process that scores was ended by SIGKILL" in said
    assert "memory is short" in said and "Traceback" not in said


def test_signals_to_all_processes_cost_no_answer_and_leave_no_process(packages, rows, expected):
    flags = ("--max-wait-ms", 0, "--max-batch", 1, "--deadline-ms", 60_000)
    with serving(packages / "first", *flags, code=130, alone=True, new_group=True) as running:
        (process,) = running.scoring()
        (forking,) = servers(running.process.pid)
        # It has imported what its forks need, and no thread that they would lack: jemalloc replaces its own.
        assert "fbgemm_gpu" in Path(f"/proc/{forking}/maps").read_text()
        threads = [path.read_text() for path in Path(f"/proc/{forking}/task").glob("*/comm")]
        assert sorted(name.startswith("jemalloc") for name in threads) in ([False], [False, True])
        os.kill(process, signal.SIGSTOP)
        asked = ask_and_wait(running, rows[:2])
        # Supervisors may send SIGTERM to all processes of the server, and Ctrl-C sends SIGINT to them.
        for receiver in (process, forking):
            os.kill(receiver, signal.SIGTERM)
        os.killpg(running.process.pid, signal.SIGINT)
        os.kill(process, signal.SIGCONT)
        for future, answer in zip(asked, expected.answers[:2], strict=True):
            assert same(future.result(30).json()["rows"], [answer])
        assert "Traceback" not in finish(running.process, 130)
        assert not Path(f"/proc/{process}").exists()
        wait_until(lambda: not Path(f"/proc/{forking}").exists())


def test_a_computation_longer_than_the_grace_period_is_cut_off(packages, rows):
    flags = ("--max-wait-ms", 0, "--deadline-ms", 60_000, "--grace-s", 1)
    with serving(packages / "first", *flags, code=1) as running:
        (process,) = running.scoring()
        os.kill(process, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(running.client.post, "/score", json={"rows": rows[:1]})
            begun = lambda: "recsys_batch_rows_count 1.0" in running.client.get("/metrics").text  # noqa: E731
            wait_for(begun, running.process)
            running.process.send_signal(signal.SIGTERM)
            assert "did not end within 1 s and was cut off" in finish(running.process, 1)
            asked.exception(30)
        assert not Path(f"/proc/{process}").exists()


def test_a_killed_server_leaves_no_process_that_scores(packages):
    with serving(packages / "first", code=-signal.SIGKILL) as running:
        (process,) = running.scoring()
        running.process.kill()
        wait_until(lambda: not Path(f"/proc/{process}").exists())


def test_the_process_that_speaks_http_does_without_pytorch():
    code = "import sys, recsys.serve, recsys.serving.server; print([n for n in sys.modules if n == 'torch'])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert shown.stdout == "[]\n"


def test_an_answer_later_than_the_deadline_is_504(packages, rows):
    with serving(packages / "first", "--max-wait-ms", 400, "--deadline-ms", 100) as running:
        answer = running.client.post("/score", json={"rows": rows[:1]})
        assert answer.status_code == 504 and "100 ms" in answer.json()["error"]


def test_wrong_calls_say_what_to_do(packages, tmp_path):
    package = ("--package", packages / "first")
    empty = tmp_path / "token"
    empty.write_text(" \n")
    assert "no token in it" in command("serve", *package, "--token-file", empty, code=2)
    assert "--token-env NONE: there is no token" in command("serve", *package, "--token-env", "NONE", code=2)
    assert "cannot be read" in command("serve", *package, "--token-file", tmp_path / "x", code=2)
    assert "served as it was exported" in command("serve", *package, "--set", "predict.top_k=3", code=2)
    assert "'-1' is not an integer from 0 to 65535" in command("serve", *package, "--port=-1", code=2)
    assert "vocabulary" in said_by_serve("--package", packages / "broken", code=1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = command("serve", *package, "--port", taken.getsockname()[1], code=1)
    assert "cannot listen there: Address already in use" in said
    assert "dry run" in said_by_serve(*package, "--dry-run")
