"""The load generator: its percentiles and arrival times, and a client that keeps connections."""

import asyncio
import inspect
import statistics
from collections import Counter
from types import SimpleNamespace

import pyarrow as pa
import pytest

from scripts import bench_http
from scripts.bench_http import Client, arrivals, gauge, offer, percentile, slope, soak


@pytest.mark.parametrize(
    ("count", "share", "expected"),
    # Of 1, 2, ... n the smallest value that n * share of them do not exceed.
    [(1, 0.5, 1), (1, 0.99, 1), (2, 0.5, 1), (3, 0.5, 2), (100, 0.99, 99), (101, 0.99, 100), (10, 0.9, 9)],
)
def test_percentiles_are_those_of_the_nearest_rank(count, share, expected):
    assert percentile([float(value) for value in range(count, 0, -1)], share) == expected


def test_without_values_there_is_no_percentile():
    assert percentile([], 0.5) != percentile([], 0.5)


def test_arrivals_are_a_poisson_process():
    times = list(arrivals(200.0, 100.0))
    assert times == sorted(times) and 0 < times[0] and times[-1] < 100
    # 20,000 events are expected, with a standard deviation of 141.
    assert abs(len(times) - 20_000) < 5 * 141
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    # Gaps are exponential: mean and standard deviation are 1 / rate.
    assert statistics.mean(gaps) == pytest.approx(1 / 200, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 200, rel=0.05)


class Server:
    """Answers after `pause` seconds, one request at a time; the status is the request's body."""

    def __init__(self, pause: float) -> None:
        self._pause, self._alone = pause, asyncio.Lock()
        self.connections = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.split("Content-Length: ")[1].split("\r\n")[0])
                status = (await reader.readexactly(length)).decode()
                async with self._alone:
                    await asyncio.sleep(self._pause)
                if status == "cut":
                    return
                writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: 2\r\n\r\n{{}}".encode())
        except asyncio.IncompleteReadError:
            return
        finally:
            writer.close()


def measured(pause: float, bodies: list[bytes], rate: float, seconds: float, connections: int):
    """Offers requests to a `Server`; returns what was measured and the server."""

    async def run():
        served = Server(pause)
        listening = await asyncio.start_server(served, bench_http.HOST, 0)
        client = Client(listening.sockets[0].getsockname()[1], connections)
        actual = await offer(client, "/x", bodies, rate, seconds)
        client.close()
        listening.close()
        return actual, served

    return asyncio.run(run())


def test_latency_counts_from_the_time_at_which_a_request_was_due():
    # 20 ms a request, one at a time, and 100 requests/s: request i of n waits for those before it.
    actual, served = measured(0.02, [b"200"], 100.0, 0.3, 1)
    count = len(list(arrivals(100.0, 0.3)))
    assert actual.statuses == {"200": count} and served.connections == 1
    last = list(arrivals(100.0, 0.3))[-1]
    assert max(actual.seconds) >= 0.02 * count - last
    assert actual.throughput <= 50


def test_failures_are_counted_and_are_no_latencies():
    actual, _ = measured(0.0, [b"200", b"503", b"cut"], 300.0, 0.1, 4)
    count = len(list(arrivals(300.0, 0.1)))
    assert actual.statuses == {
        "200": -(-count // 3),
        "503": -(-(count - 1) // 3),
        "ConnectionError": count // 3,
    }
    assert len(actual.seconds) == actual.statuses["200"]


def test_a_soak_tells_how_memory_grows(monkeypatch, capsys):
    """A server whose memory grows by 2 MiB a minute, under a clock that offers move."""
    clock = [0.0]

    class Growing:
        async def ask(self, method, path):
            memory = 2**20 * (60 + clock[0] / 30)
            text = f"process_resident_memory_bytes {memory}\nprocess_open_fds 7.0\n"
            for package in "AB":
                text += f'recsys_scoring_resident_memory_bytes{{package="{package}"}} {20 * 2**20}\n'
            return bench_http.Answer("200", text.encode())

    async def offer(client, path, bodies, rate, seconds):
        clock[0] += seconds
        return bench_http.Measured([0.25, 0.5], Counter({"200": 2}), 9.5)

    monkeypatch.setattr(bench_http, "offer", offer)
    monkeypatch.setattr(bench_http, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    asyncio.run(soak(Growing(), "/score", [b"{}"], 200.0, 150.0))
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[2] == "| 60 | 10 | 250.0 | 500.0 | 102.0 | 7 | 2 x 200 |"
    # The last piece is half a minute.
    assert lines[4] == "| 150 | 10 | 250.0 | 500.0 | 105.0 | 7 | 2 x 200 |"
    assert lines[-1] == "memory grows by 120.0 MiB/h in the second half"


def test_a_slope_is_that_of_the_line_and_a_metric_is_found_by_its_whole_name():
    assert slope([(x, 3.0 * x - 7) for x in (0.0, 1.0, 5.0, 9.0)]) == pytest.approx(3)
    assert slope([(0.0, 1.0), (1.0, 3.0), (2.0, 2.0)]) == pytest.approx(0.5)
    text = '# HELP a about\na_total 9\na 1.5e+02\nc{x="1"} 2.5\nc{x="2"} 4\n'
    assert gauge(text, "a") == 150 and gauge(text, "c") == 6.5
    with pytest.raises(ConnectionError, match="have no b"):
        gauge(text, "b")


def test_a_connection_that_the_server_closed_is_not_used_again():
    async def run():
        served = Server(0.0)
        listening = await asyncio.start_server(served, bench_http.HOST, 0)
        client = Client(listening.sockets[0].getsockname()[1], 1)
        statuses = []
        for _ in range(2):
            statuses.append((await client.ask("POST", "/x", b"200")).status)
            (idle,) = client._idle
            idle[0].feed_eof()
        client.close()
        listening.close()
        return statuses, served.connections

    assert asyncio.run(run()) == (["200", "200"], 2)


def test_a_row_is_sent_as_a_stream_of_its_type():
    sent = []

    async def answer(reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        sent.append((head, await reader.readexactly(int(head.split("Content-Length: ")[1].split("\r\n")[0]))))
        writer.write(b"HTTP/1.1 200 X\r\ncontent-length: 0\r\n\r\n")

    async def run(body):
        listening = await asyncio.start_server(answer, bench_http.HOST, 0)
        client = Client(listening.sockets[0].getsockname()[1], 1, content_type=bench_http.ARROW)
        await client.ask("POST", "/x", body)
        client.close()
        listening.close()

    table = pa.table({"user_id": [7, 8], "uih_item": [[1], [2, 3]]})
    asyncio.run(run(bench_http.arrow_stream(table.slice(1, 1))))
    ((head, body),) = sent
    assert "\r\nContent-Type: application/vnd.apache.arrow.stream\r\n" in head
    assert pa.ipc.open_stream(body).read_all().to_pylist() == [{"user_id": 8, "uih_item": [2, 3]}]


def test_only_this_machine_can_be_loaded():
    assert bench_http.HOST == "127.0.0.1"
    assert list(inspect.signature(Client).parameters) == ["port", "connections", "token", "content_type"]
