"""The load generator: its percentiles and arrival times, and a client that keeps connections."""

import asyncio
import inspect
import statistics

import pytest

from scripts import bench_http
from scripts.bench_http import Client, arrivals, offer, percentile


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


def test_only_this_machine_can_be_loaded():
    assert bench_http.HOST == "127.0.0.1"
    assert list(inspect.signature(Client).parameters) == ["port", "connections", "token"]
