"""CUDA graphs: kernels that are recorded once and started with one call."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import Tensor

from recsys.ops import last_backend

Replay = Callable[[], Tensor]
"""Runs what was recorded: the same tensor each time, overwritten."""

Record = Callable[[Callable[[], Tensor]], Replay]
"""Records a function of no arguments, which reads and makes tensors of constant sizes."""

WARM_UP = 2
"""Pieces of a form that run unrecorded: kernels are compiled, and a form that is not seen again costs no
graph.
"""


def record_of(record: Record | None, device: torch.device, op: str) -> Record | None:
    """What records on a device: as given, else CUDA graphs where kernels do not wait, by the backend that an
    attention has run with.
    """
    if record is not None or device.type != "cuda":
        return record
    return None if last_backend(op) == "reference" else CudaGraph


class CudaGraph:
    """A function's kernels as one CUDA graph.

    Args:
        run: has run before, with tensors of these sizes.
        pool: memory that it shares with other graphs; None for its own.
    """

    def __init__(self, run: Callable[[], Tensor], pool: tuple[int, int] | None = None):
        self._graph = torch.cuda.CUDAGraph()
        gc.collect()  # to destroy another graph while this one is recorded would spoil it
        enabled = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                self._output = run()
        finally:
            if enabled:
                gc.enable()

    def __call__(self) -> Tensor:
        """Starts it; returns its output."""
        self._graph.replay()
        return self._output


def room_for(count: int) -> int:
    """The next power of two: few forms for many sizes."""
    return 1 << max(count - 1, 0).bit_length()
