"""The meter against a clock that the test turns."""

import pytest

from recsys.training import throughput
from recsys.training.throughput import Meter


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: now[0])
    return now


def test_rates_leave_out_pauses_and_show_waiting(clock):
    meter = Meter()

    def slow():
        clock[0] += 3
        yield "batch"

    assert list(meter.watch(slow())) == ["batch"]
    clock[0] += 5
    meter.add(samples=40, tokens=800, batches=2)
    with meter.paused():
        clock[0] += 100
    rates = meter.take()
    assert rates.samples_per_s == 40 / 8
    assert rates.tokens_per_s == 800 / 8
    assert rates.batches_per_s == 2 / 8
    assert rates.data_wait == 3 / 8


def test_each_reading_starts_a_new_interval(clock):
    meter = Meter()
    clock[0] += 1
    meter.add(10, 10, 1)
    meter.take()
    clock[0] += 2
    meter.add(10, 10, 1)
    assert meter.take().samples_per_s == 5
