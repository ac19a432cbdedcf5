"""Loads a running `recsys serve` with requests at random times, and says how long they take.

    recsys serve --package runs/quickstart/export --port 8000
    python scripts/bench_http.py --port 8000 --input tests/data/kuairand/test.parquet --rate 50 100 200

Arrivals are open-loop (Poisson): a request is sent at its time whether or not earlier ones were answered, and
its latency counts from that time, so a server that falls behind cannot hide it. It loads this machine only.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from typing import NamedTuple

import httpx
import pyarrow.parquet as pq

HOST = "127.0.0.1"
"""The one address that is loaded: no flag names another machine."""


class Measured(NamedTuple):
    """Results at one rate: seconds of successful requests, answers by status, and answers of 200 a second."""

    seconds: list[float]
    statuses: Counter[str]
    throughput: float


def percentile(values: list[float], share: float) -> float:
    """Returns the smallest value that at least `share` of the values do not exceed; NaN without values."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)] if ordered else float("nan")


async def offer(
    client: httpx.AsyncClient, path: str, bodies: list[bytes], rate: float, seconds: float
) -> Measured:
    """Sends `rate` requests a second for `seconds`, waits for all answers, and measures them."""
    taken: list[float] = []
    statuses: Counter[str] = Counter()
    start = time.perf_counter()

    async def ask(number: int, due: float) -> None:
        try:
            answer = await client.post(path, content=bodies[number % len(bodies)])
            status = str(answer.status_code)
        except httpx.HTTPError as error:
            status = type(error).__name__
        statuses[status] += 1
        if status == "200":
            taken.append(time.perf_counter() - due)

    tasks, due = [], start
    clock = random.Random(0)
    while (due := due + clock.expovariate(rate)) < start + seconds:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(len(tasks), due)))
    await asyncio.gather(*tasks)
    return Measured(taken, statuses, len(taken) / (time.perf_counter() - start))


async def measure(flags: argparse.Namespace) -> None:
    """Measures all rates and prints a table."""
    headers = {"Authorization": f"Bearer {os.environ[flags.token_env]}"} if flags.token_env else {}
    limits = httpx.Limits(max_connections=flags.connections, max_keepalive_connections=flags.connections)
    url = f"http://{HOST}:{flags.port}"
    async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=30) as client:
        described = (await client.get("/openapi.json")).raise_for_status().json()
        path = "/score" if "/score" in described["paths"] else "/recommend"
        fields = described["components"]["schemas"]["Row"]["properties"]
        table = pq.read_table(flags.input).slice(0, 1000)
        rows = table.select([name for name in table.column_names if name in fields]).to_pylist()
        bodies = [json.dumps({"rows": [row]}).encode() for row in rows]
        (await client.post(path, content=bodies[0])).raise_for_status()
        await offer(client, path, bodies, min(flags.rate), 2)
        print("| offered/s | answered/s | p50 ms | p90 ms | p99 ms | answers |")
        print("| ---: | ---: | ---: | ---: | ---: | --- |")
        for rate in flags.rate:
            found = await offer(client, path, bodies, rate, flags.seconds)
            times = [f"{1000 * percentile(found.seconds, share):.1f}" for share in (0.5, 0.9, 0.99)]
            answers = ", ".join(f"{count:,} x {status}" for status, count in sorted(found.statuses.items()))
            print(f"| {rate:g} | {found.throughput:.0f} | {' | '.join(times)} | {answers} |", flush=True)


def main() -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--port", type=int, required=True, help=f"of a server at {HOST}")
    parser.add_argument("--input", required=True, help="parquet file with rows, one for each request")
    parser.add_argument(
        "--rate", type=float, nargs="+", default=[50.0, 100.0, 200.0], help="requests a second"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="for each rate (default: 10)")
    parser.add_argument("--connections", type=int, default=32, help="at most (default: 32)")
    parser.add_argument("--token-env", metavar="NAME", help="environment variable with the server's token")
    flags = parser.parse_args()
    try:
        asyncio.run(measure(flags))
    except (httpx.HTTPError, OSError) as error:
        print(f"{HOST}:{flags.port}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
