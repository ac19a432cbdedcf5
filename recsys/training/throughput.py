"""Measures the speed of a run, its use of the device, and the time it waits for data."""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

Item = TypeVar("Item")

PEAKS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
}
"""Peak dense bfloat16 FLOP/s by part of a GPU's name, from NVIDIA's data sheets. The first match counts."""


@dataclass(frozen=True)
class Rates:
    """The speed of training over an interval, over all ranks.

    Attributes:
        batches_per_s, samples_per_s, tokens_per_s: counts per second of training time, which excludes
            evaluation and saving.
        data_wait: share of that time, 0 to 1, in which this rank waited for its reader.
        flop_per_s: useful FLOP per second, without padding and recomputation.
        mfu: `flop_per_s` as a share, 0 to 1, of the devices' bfloat16 peak, whatever the model's precision;
            None if the peak is not known.
    """

    batches_per_s: float
    samples_per_s: float
    tokens_per_s: float
    data_wait: float
    flop_per_s: float = 0.0
    mfu: float | None = None


class Meter:
    """Counts work and measures its time.

    Args:
        peak_flop_per_s: peak of one device; None if it is not known.
        devices: number of devices.
    """

    def __init__(self, peak_flop_per_s: float | None = None, devices: int = 1) -> None:
        self._peak = None if peak_flop_per_s is None else peak_flop_per_s * devices
        self._samples = self._tokens = self._batches = 0
        self._flop = self._waited = self._paused = 0.0
        self._began = time.perf_counter()

    def watch(self, items: Iterator[Item]) -> Iterator[Item]:
        """Yields `items` and counts the time to get each item as waiting."""
        while True:
            began = time.perf_counter()
            try:
                item = next(items)
            except StopIteration:
                return
            self._waited += time.perf_counter() - began
            yield item

    def add(self, samples: int, tokens: int, flop: float) -> None:
        """Counts a finished batch."""
        self._samples += samples
        self._tokens += tokens
        self._flop += flop
        self._batches += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time in this block from training."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - began

    def take(self) -> Rates:
        """Returns the speed since the last call and starts a new interval."""
        now = time.perf_counter()
        seconds = max(now - self._began - self._paused, 1e-9)
        rates = Rates(
            batches_per_s=self._batches / seconds,
            samples_per_s=self._samples / seconds,
            tokens_per_s=self._tokens / seconds,
            data_wait=min(self._waited / seconds, 1.0),
            flop_per_s=self._flop / seconds,
            mfu=None if self._peak is None else self._flop / seconds / self._peak,
        )
        self._samples = self._tokens = self._batches = 0
        self._flop = self._waited = self._paused = 0.0
        self._began = now
        return rates


def peak_flop_per_s(device: torch.device) -> float | None:
    """Returns the peak dense bfloat16 FLOP/s of a device; None for CPUs and GPUs that are not in `PEAKS`."""
    if device.type != "cuda":
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(device_name: str) -> float | None:
    """Returns the entry of `PEAKS` for a name such as `NVIDIA H100 80GB HBM3`; None if there is none."""
    words = f" {device_name.replace('-', ' ')} "
    return next((peak for part, peak in PEAKS.items() if f" {part} " in words), None)


def peak_memory(device: torch.device) -> int:
    """Returns the peak memory of this process in bytes, on its GPU or else in RAM (without its readers)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
