"""Replays scoring graphs as recorded CUDA graphs.

A small request launches hundreds of kernels, one after another, each of which does little: the GPU waits for
the host. A CUDA graph launches all of them at once: encoding users and histories and scoring candidates,
scoring candidates against a cache, or the whole search of a model that finds items. Its sizes are fixed, so
inputs are padded; see `padded_inputs`.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from recsys.scoring.padded_inputs import Buffers, PaddedInputs, Sizes

MOST_ENTRIES = 2**24
"""Calls are recorded up to this many entries: all tokens (events, candidates, cached ones) and beams, times
the width. Larger ones keep the GPU busy for longer than their launches take."""

MOST_GRAPHS = 64
"""Sizes beyond this number are not recorded. Graphs share their memory, except for their inputs."""

Run = Callable[..., Tensor | tuple[Tensor, ...]]
"""Maps the tensors of a signature to tensors of candidates or of rows."""

log = logging.getLogger(__name__)


class _Recorded(NamedTuple):
    """A graph, with the memory of its inputs and outputs."""

    graph: torch.cuda.CUDAGraph
    buffers: Buffers
    outputs: tuple[Tensor, ...]


class RecordedScoring:
    """Runs a scoring graph; replays a recording of it for sizes that come again. Threads may share it.

    Inputs of sizes that come for the first time, of large sizes, and on a stream that is not the default one
    run as they are. If recording fails, everything does.

    Args:
        run: the scoring graph, as a function of tensors on a GPU.
        inputs: pads the inputs of the graph.
        device: the GPU.
        name: says in logs what is recorded.
    """

    def __init__(self, run: Run, inputs: PaddedInputs, device: torch.device, name: str) -> None:
        self._run, self._device, self._inputs, self._name = run, device, inputs, name
        self._graphs: dict[Sizes, _Recorded | None] = {}
        self._lock = threading.Lock()
        self._pool: tuple[int, int] | None = None
        self._records = True

    @property
    def num_graphs(self) -> int:
        """The number of sizes that have been recorded."""
        return sum(recorded is not None for recorded in self._graphs.values())

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Maps inputs on any device to outputs on the GPU. Call it under `torch.no_grad()`."""
        with self._lock:
            outputs = self._replay(inputs)
            return outputs or as_tuple(self._run(*(tensor.to(self._device) for tensor in inputs)))

    def replay(self, *inputs: Tensor) -> tuple[Tensor, ...] | None:
        """Returns the outputs if the sizes of the inputs are recorded, now or before; else None."""
        with self._lock:
            return self._replay(inputs)

    def _replay(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
        sizes = self._sizes(inputs)
        if sizes is None:
            return None
        recorded = self._graphs[sizes]
        if recorded is None:
            recorded = self._record(sizes, inputs)
            if recorded is None:
                return None
            self._graphs[sizes] = recorded
        else:
            recorded.buffers.fill(inputs)
            recorded.graph.replay()
        count = self._inputs.dims(inputs)[self._inputs.of_rows]
        return tuple(output[:count].clone() for output in recorded.outputs)

    def _sizes(self, inputs: Sequence[Tensor]) -> Sizes | None:
        """Returns the sizes for which a graph is there or may be recorded; None if the call runs as it is."""
        if not self._records:
            return None
        stream = torch.cuda.current_stream(self._device)
        if stream != torch.cuda.default_stream(self._device):
            return None
        sizes = self._inputs.sizes(inputs)
        if sizes in self._graphs:
            return sizes
        if self._inputs.entries(sizes) <= MOST_ENTRIES and len(self._graphs) < MOST_GRAPHS:
            self._graphs[sizes] = None
        return None

    def _record(self, sizes: Sizes, inputs: Sequence[Tensor]) -> _Recorded | None:
        """Records a graph and replays it for these inputs; None, and no further recording, if it fails."""
        buffers = self._inputs.buffers(sizes, self._device)
        buffers.fill(inputs)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # This also compiles kernels, and lets libraries allocate what they keep.
        expected = as_tuple(self._run(*buffers.tensors))
        try:
            with recording(graph, self._pool):
                outputs = as_tuple(self._run(*buffers.tensors))
        except RuntimeError as error:
            self._give_up(str(error).strip().splitlines()[0])
            return None
        graph.replay()
        if not all(map(_is_close, outputs, expected)):
            self._give_up("a replay gave other scores")
            return None
        return _Recorded(graph, buffers, outputs)

    def _give_up(self, reason: str) -> None:
        log.warning("%s is not recorded as a CUDA graph, which would be faster: %s", self._name, reason)
        self._records = False


def as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Returns the outputs of a graph as a tuple, even if there is only one."""
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def _is_close(replayed: Tensor, computed: Tensor) -> bool:
    """Compares scores; the items of nearly equal scores may change places. Fillers may be NaN."""
    if not computed.is_floating_point():
        return replayed.shape == computed.shape
    return torch.allclose(replayed, computed, rtol=1e-2, atol=1e-2, equal_nan=True)


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, pool: tuple[int, int]) -> Iterator[None]:
    """Records into a graph what its block computes. Other threads, such as one that loads a package, may
    meanwhile call what no graph can hold.

    Args:
        graph: an empty graph.
        pool: memory that graphs share, from `torch.cuda.graph_pool_handle`.

    Raises:
        RuntimeError: the block does what cannot be recorded. Stream and random numbers are as before.
    """
    stream = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
    except RuntimeError:
        # PyTorch stays in the stream of a failed recording, and its generator believes that it is running.
        torch.cuda.set_stream(stream)
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(torch.Generator("cuda").graphsafe_get_state())
        raise
