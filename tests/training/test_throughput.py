"""The meter against a clock that the test moves."""

from pathlib import Path

import pytest
import torch

from recsys.training import throughput
from recsys.training.throughput import Meter, peak_flop_per_s, peak_memory, peak_of

STATUS = Path("/proc/self/status")


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: now[0])
    return now


def test_rates_leave_out_pauses_and_show_waiting(clock):
    meter = Meter(peak_flop_per_s=1000.0, devices=2)

    def slow():
        clock[0] += 3
        yield "batch"

    assert list(meter.watch(slow())) == ["batch"]
    clock[0] += 5
    meter.add(samples=30, tokens=500, flop=1000)
    meter.add(samples=10, tokens=300, flop=600)
    with meter.paused():
        clock[0] += 100
    rates = meter.take()
    assert rates.samples_per_s == 40 / 8
    assert rates.tokens_per_s == 800 / 8
    assert rates.batches_per_s == 2 / 8
    assert rates.data_wait == 3 / 8
    assert rates.flop_per_s == 1600 / 8
    assert rates.mfu == 200 / 2000


def test_each_reading_starts_a_new_interval(clock):
    meter = Meter()
    clock[0] += 1
    meter.add(10, 10, 1)
    meter.take()
    clock[0] += 2
    meter.add(10, 10, 1)
    rates = meter.take()
    assert (rates.samples_per_s, rates.flop_per_s, rates.mfu) == (5, 0.5, None)


@pytest.mark.parametrize(
    ("name", "tflop_per_s"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
    ],
)
def test_peaks_of_data_sheets(name, tflop_per_s):
    assert peak_of(name) == tflop_per_s * 1e12


def test_no_peak_is_guessed():
    assert peak_of("NVIDIA L400") is None
    assert peak_flop_per_s(torch.device("cpu")) is None


@pytest.mark.skipif(not STATUS.exists(), reason="the peer is Linux's /proc")
def test_peak_memory_is_what_the_system_says():
    held = torch.ones(64 * 2**20, dtype=torch.uint8)
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    system = int(line.split()[1]) * 1024
    actual = peak_memory(torch.device("cpu"))
    del held
    assert actual == pytest.approx(system, rel=0.02)
    assert peak_memory(torch.device("cpu")) >= actual
