"""Puts load on a running `recsys serve` at random times, and reports latencies.

    recsys serve --package runs/quickstart/export --port 8000
    python scripts/bench_http.py --port 8000 --input tests/data/kuairand/test.parquet --rate 50 100 200
    python scripts/bench_http.py --port 8000 --input tests/data/kuairand/test.parquet --rate 10 --soak 600

Arrivals are open-loop (Poisson): a request is sent at its time whether or not earlier ones were answered,
and its latency counts from that time, so a server that falls behind cannot hide it. The server must run on
this machine. The client uses asyncio's streams directly, because a full HTTP client takes more time than
the server.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

HOST = "127.0.0.1"
"""Address of the server: the load never goes to another machine."""

ARROW = "application/vnd.apache.arrow.stream"
"""Type of the bodies that are Arrow streams."""

WINDOW = 60.0
"""Seconds of a soak that make a line."""

MEMORY = "process_resident_memory_bytes", "recsys_scoring_resident_memory_bytes"
"""Metrics of the process that speaks HTTP, and of those that score."""

TIMEOUT = 30.0
"""Seconds after which an answer counts as missing."""


class Measured(NamedTuple):
    """Results at one rate: seconds of successful requests, answers by status, successes per second."""

    seconds: list[float]
    statuses: Counter[str]
    throughput: float


class Answer(NamedTuple):
    """An HTTP status and the body."""

    status: str
    body: bytes


def percentile(values: list[float], share: float) -> float:
    """Returns the smallest value that at least `share` of the values do not exceed; NaN without values."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)] if ordered else float("nan")


def arrivals(rate: float, seconds: float, seed: int = 0) -> Iterator[float]:
    """Yields the times of a Poisson process with `rate` events per second, from 0 to `seconds`."""
    clock, due = random.Random(seed), 0.0
    while (due := due + clock.expovariate(rate)) < seconds:
        yield due


class Client:
    """Keep-alive connections to one port of this machine.

    Args:
        port: port of the server.
        connections: most connections. A further request waits for a connection, which counts as its latency.
        token: token to send with each request; None for none.
        content_type: type of the bodies; None to send none.
    """

    def __init__(
        self, port: int, connections: int, token: str | None = None, content_type: str | None = None
    ) -> None:
        self._port, self._room = port, asyncio.Semaphore(connections)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._headers = f"Host: {HOST}:{port}\r\n"
        if token is not None:
            self._headers += f"Authorization: Bearer {token}\r\n"
        if content_type is not None:
            self._headers += f"Content-Type: {content_type}\r\n"

    async def ask(self, method: str, path: str, body: bytes = b"") -> Answer:
        """Sends a request and returns its answer.

        Raises:
            OSError: there is no connection, or it ended before the answer.
            TimeoutError: the answer took longer than `TIMEOUT`.
        """
        head = f"{method} {path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n"
        async with self._room:
            # The server closes connections that were idle for long.
            self._idle = [idle for idle in self._idle if not idle[0].at_eof()]
            connection = self._idle.pop() if self._idle else await asyncio.open_connection(HOST, self._port)
            keep = False
            try:
                connection[1].write(head.encode() + body)
                answer, keep = await asyncio.wait_for(_read(connection[0]), TIMEOUT)
                return answer
            except asyncio.IncompleteReadError as error:
                raise ConnectionError("the connection ended before the answer") from error
            finally:
                if keep:
                    self._idle.append(connection)
                else:
                    connection[1].close()

    def close(self) -> None:
        """Closes all connections."""
        for _, writer in self._idle:
            writer.close()


async def _read(reader: asyncio.StreamReader) -> tuple[Answer, bool]:
    """Reads an answer; also returns whether the connection stays open."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines if line)
    body = await reader.readexactly(int(headers["content-length"]))
    return Answer(first.split()[1], body), headers.get("connection") != "close"


async def offer(client: Client, path: str, bodies: list[bytes], rate: float, seconds: float) -> Measured:
    """Sends `rate` requests per second for `seconds`, waits for all answers, and measures them."""
    taken: list[float] = []
    statuses: Counter[str] = Counter()
    start = time.perf_counter()

    async def ask(number: int, due: float) -> None:
        try:
            status = (await client.ask("POST", path, bodies[number % len(bodies)])).status
        except (OSError, asyncio.TimeoutError) as error:
            status = type(error).__name__
        statuses[status] += 1
        if status == "200":
            taken.append(time.perf_counter() - due)

    tasks: list[asyncio.Task[None]] = []
    loop, cancelled = asyncio.get_running_loop(), threading.Event()

    def begin(due: float) -> None:
        tasks.append(asyncio.create_task(ask(len(tasks), due)))

    def keep_time() -> None:
        # A thread, because asyncio rounds waiting times up to whole milliseconds.
        for after in arrivals(rate, seconds):
            if cancelled.wait(max(0.0, start + after - time.perf_counter())):
                return
            loop.call_soon_threadsafe(begin, start + after)

    try:
        await asyncio.to_thread(keep_time)
    finally:
        cancelled.set()
    await asyncio.gather(*tasks)
    return Measured(taken, statuses, len(taken) / (time.perf_counter() - start))


async def measure(flags: argparse.Namespace) -> None:
    """Measures all rates and prints a table."""
    token = os.environ[flags.token_env] if flags.token_env else None
    client = Client(flags.port, flags.connections, token, ARROW if flags.arrow else None)
    described = json.loads(_require(await client.ask("GET", "/openapi.json")).body)
    path = "/score" if "/score" in described["paths"] else "/recommend"
    fields = described["components"]["schemas"]["Row"]["properties"]
    table = pq.read_table(flags.input).slice(0, 1000)
    table = table.select([name for name in table.column_names if name in fields])
    if flags.arrow:
        bodies = [arrow_stream(table.slice(row, 1)) for row in range(table.num_rows)]
    else:
        bodies = [json.dumps({"rows": [row]}).encode() for row in table.to_pylist()]
    _require(await client.ask("POST", path, bodies[0]))
    await offer(client, path, bodies, min(flags.rate), 2)
    if flags.soak:
        await soak(client, path, bodies, flags.rate[0], flags.soak)
        client.close()
        return
    print("| offered/s | answered/s | p50 ms | p90 ms | p99 ms | client's CPU | answers |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | --- |")
    for rate in flags.rate:
        began, cpu = time.perf_counter(), time.process_time()
        offered = await offer(client, path, bodies, rate, flags.seconds)
        busy = (time.process_time() - cpu) / (time.perf_counter() - began)
        times = [f"{1000 * percentile(offered.seconds, share):.1f}" for share in (0.5, 0.9, 0.99)]
        answers = ", ".join(f"{count:,} x {status}" for status, count in sorted(offered.statuses.items()))
        numbers = [f"{rate:g}", f"{offered.throughput:.0f}", *times, f"{100 * busy:.0f} %", answers]
        print(f"| {' | '.join(numbers)} |", flush=True)
    client.close()


def arrow_stream(table: pa.Table) -> bytes:
    """Returns a table as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


async def soak(client: Client, path: str, bodies: list[bytes], rate: float, seconds: float) -> None:
    """Offers one rate for long, and prints the server's memory and open files over time."""
    print("| s | answered/s | p50 ms | p99 ms | memory MiB | open files | answers |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | --- |")
    began, points = time.perf_counter(), []
    while (now := time.perf_counter() - began) < seconds:
        measured = await offer(client, path, bodies, rate, min(WINDOW, seconds - now))
        text = _require(await client.ask("GET", "/metrics")).body.decode()
        memory = sum(gauge(text, name) for name in MEMORY) / 2**20
        points.append((time.perf_counter() - began, memory))
        times = [f"{1000 * percentile(measured.seconds, share):.1f}" for share in (0.5, 0.99)]
        answers = ", ".join(f"{count:,} x {status}" for status, count in sorted(measured.statuses.items()))
        cells = [f"{points[-1][0]:.0f}", f"{measured.throughput:.0f}", *times, f"{memory:.1f}"]
        cells += [f"{gauge(text, 'process_open_fds'):.0f}", answers]
        print(f"| {' | '.join(cells)} |", flush=True)
    later = points[len(points) // 2 :]
    if len(later) > 1:
        print(f"\nmemory grows by {3600 * slope(later):.1f} MiB/h in the second half")


def gauge(text: str, name: str) -> float:
    """Returns a metric in Prometheus's text format, summed over its labels.

    Raises:
        ConnectionError: there is no such metric.
    """
    beginnings = f"{name} ", f"{name}{{"
    values = [float(line.split()[-1]) for line in text.splitlines() if line.startswith(beginnings)]
    if not values:
        raise ConnectionError(f"the server's metrics have no {name}")
    return sum(values)


def slope(points: list[tuple[float, float]]) -> float:
    """Returns the slope of the least-squares line through points (x, y)."""
    x_mean = sum(x for x, _ in points) / len(points)
    y_mean = sum(y for _, y in points) / len(points)
    return sum((x - x_mean) * (y - y_mean) for x, y in points) / sum((x - x_mean) ** 2 for x, _ in points)


def _require(answer: Answer) -> Answer:
    if answer.status != "200":
        raise ConnectionError(f"status {answer.status}: {answer.body.decode()[:500]}")
    return answer


def main() -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--port", type=int, required=True, help=f"port of a server at {HOST}")
    parser.add_argument("--input", required=True, help="parquet file, each row of which is a request")
    parser.add_argument(
        "--rate", type=float, nargs="+", default=[50.0, 100.0, 200.0], help="requests per second"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of each rate (default: 10)")
    parser.add_argument("--connections", type=int, default=32, help="most connections (default: 32)")
    parser.add_argument(
        "--token-env", metavar="NAME", help="environment variable that holds the server's token"
    )
    parser.add_argument("--arrow", action="store_true", help="send Arrow streams in place of JSON")
    about = "seconds; offers the first rate for so long and prints the server's memory over time"
    parser.add_argument("--soak", type=float, metavar="SECONDS", help=about)
    flags = parser.parse_args()
    try:
        asyncio.run(measure(flags))
    except (OSError, asyncio.TimeoutError) as error:
        print(f"{HOST}:{flags.port}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
