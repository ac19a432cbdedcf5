"""Replays the scoring graph of a model that finds items as a recorded CUDA graph.

A beam search launches hundreds of kernels, one after another, each of which does little. For a few rows at a
time the GPU waits for the host. A CUDA graph launches all of them at once: encoding the history and the whole
search. Its sizes are fixed, so inputs are padded to one of a few sizes, which rows that do not count fill up.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from recsys import protos as pb
from recsys.config.declarations import model_of
from recsys.models.base import layout_rule
from recsys.scoring.signature import EVENTS, LONGEST, ROWS, SEEN, SHORTEST, scoring_signature, steps

MOST_ENTRIES = 2**24
"""Calls are recorded up to this many entries: (tokens of histories + beams of all rows) x width. Larger ones
keep the GPU busy for longer than their launches take."""

MOST_GRAPHS = 64
"""Sizes beyond this number are not recorded. Graphs share their memory, except for their inputs."""

LEAST = 64
"""The least length of histories and lists of seen items to which inputs are padded."""

Run = Callable[..., tuple[Tensor, ...]]
"""Maps the tensors of `scoring_signature` to tensors of rows."""

log = logging.getLogger(__name__)


class Sizes(NamedTuple):
    """The sizes of padded inputs.

    Attributes:
        rows: all rows, fillers included.
        fillers: the rows at the end among which surplus events are divided.
        events: events of all rows.
        seen: seen items of all rows.
        longest: the most events of a row.
    """

    rows: int
    fillers: int
    events: int
    seen: int
    longest: int


class PaddedInputs:
    """Pads the inputs of a scoring graph to a few sizes.

    Args:
        pipeline: the resolved config.
    """

    def __init__(self, pipeline: pb.Pipeline) -> None:
        self._rule, self._max_events = layout_rule(pipeline), pipeline.data.max_history_len
        self.specs = scoring_signature(pipeline)

    def tokens(self, sizes: Sizes) -> int:
        """Returns the number of tokens of all histories."""
        return sizes.events * self._rule.tokens_per_event + sizes.rows * self._rule.num_contextual

    @property
    def obstacle(self) -> str:
        """Says which input cannot be padded; "" if all can."""
        known = {ROWS, EVENTS, SEEN, LONGEST}
        for spec in self.specs:
            if not all(name in known or name.isdigit() for name in spec.dims):
                return f"{spec.name} has a number of entries of its own"
        return ""

    def sizes(self, inputs: Sequence[Tensor]) -> Sizes:
        """Returns the sizes to which inputs are padded. At most an eighth of the rows are fillers, or 1."""
        size = self.dims(inputs)
        rows = _power_of_two(size[ROWS])
        fillers = max(1, rows // 8)
        longest = (size[LONGEST] + SHORTEST - self._rule.num_contextual) // self._rule.tokens_per_event
        longest = max(longest, min(_power_of_two(max(longest, LEAST)), self._max_events))
        # The surplus is less than what the fillers can take.
        events = -(-max(size[EVENTS], 1) // (fillers * longest)) * fillers * longest
        return Sizes(rows + fillers, fillers, events, _power_of_two(max(size[SEEN], LEAST)), longest)

    def pad(self, inputs: Sequence[Tensor], sizes: Sizes) -> tuple[Tensor, ...]:
        """Returns inputs of these sizes, on the devices of the given ones. Nothing waits for a device."""
        size = self.dims(inputs)
        wanted = {ROWS: sizes.rows, EVENTS: sizes.events, SEEN: sizes.seen}
        padded = {}
        for spec, tensor in zip(self.specs, inputs, strict=True):
            if LONGEST in spec.dims:
                tokens = self._rule.num_contextual + sizes.longest * self._rule.tokens_per_event
                padded[spec.name] = steps(tokens, tensor.device)
                continue
            after = wanted[spec.dims[0]] - tensor.shape[0]
            padded[spec.name] = F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, after))
        lengths, surplus = padded["uih_lengths"], sizes.events - size[EVENTS]
        ends = [min(sizes.longest * number, surplus) for number in range(sizes.fillers + 1)]
        lengths[-sizes.fillers :] = torch.tensor(ends).diff().to(lengths.device)
        padded["seen_lengths"][-1] = sizes.seen - size[SEEN]
        return tuple(padded.values())

    def dims(self, inputs: Sequence[Tensor]) -> Mapping[str, int]:
        """Returns the sizes of named dims."""
        pairs = zip(self.specs, inputs, strict=True)
        return {name: n for spec, tensor in pairs for name, n in zip(spec.dims, tensor.shape, strict=True)}


class _Recorded(NamedTuple):
    """A graph, with the memory of its inputs and outputs."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class RecordedScoring:
    """Runs a scoring graph; replays a recording of it for sizes that come again. Threads may share it.

    Inputs of sizes that come for the first time, of large sizes, and on a stream that is not the default one
    run as they are. If recording fails, everything does.

    Args:
        run: the scoring graph, as a function of tensors on a GPU.
        pipeline: the resolved config, of a model that finds items.
        device: the GPU.
    """

    def __init__(self, run: Run, pipeline: pb.Pipeline, device: torch.device) -> None:
        self._run, self._device, self._inputs = run, device, PaddedInputs(pipeline)
        self._beams, self._width = model_of(pipeline).num_found, pipeline.model.embedding_dim
        self._graphs: dict[Sizes, _Recorded | None] = {}
        self._lock = threading.Lock()
        self._pool: tuple[int, int] | None = None
        self._records = True
        if reason := self._inputs.obstacle:
            log.info("the search is not recorded as a CUDA graph: %s", reason)
            self._records = False

    @property
    def num_graphs(self) -> int:
        """The number of sizes that have been recorded."""
        return sum(recorded is not None for recorded in self._graphs.values())

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Maps inputs on any device to outputs [B, ...] on the GPU. Call it under `torch.no_grad()`."""
        with self._lock:
            sizes = self._sizes(inputs)
            if sizes is None:
                return self._run(*(tensor.to(self._device) for tensor in inputs))
            padded = self._inputs.pad(inputs, sizes)
            recorded = self._graphs[sizes] or self._record(padded)
            if recorded is None:
                return self._run(*(tensor.to(self._device) for tensor in inputs))
            self._graphs[sizes] = recorded
            for buffer, tensor in zip(recorded.inputs, padded, strict=True):
                buffer.copy_(tensor, non_blocking=True)
            recorded.graph.replay()
            rows = self._inputs.dims(inputs)[ROWS]
            return tuple(output[:rows].clone() for output in recorded.outputs)

    def _sizes(self, inputs: Sequence[Tensor]) -> Sizes | None:
        """Returns the sizes for which a graph is there or may be recorded; None if the call runs as it is."""
        stream = torch.cuda.current_stream(self._device)
        if not self._records or stream != torch.cuda.default_stream(self._device):
            return None
        sizes = self._inputs.sizes(inputs)
        if sizes in self._graphs:
            return sizes
        entries = (self._inputs.tokens(sizes) + sizes.rows * self._beams) * self._width
        if entries <= MOST_ENTRIES and len(self._graphs) < MOST_GRAPHS:
            self._graphs[sizes] = None
        return None

    def _record(self, padded: Sequence[Tensor]) -> _Recorded | None:
        buffers = tuple(tensor.to(self._device, copy=True) for tensor in padded)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        # This also compiles kernels, and lets libraries allocate what they keep.
        expected = self._run(*buffers)
        try:
            # Other threads, such as one that loads a package, may meanwhile call what no graph can hold.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                outputs = self._run(*buffers)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            log.warning("the search is not recorded as a CUDA graph, which would be faster: %s", reason)
            self._records = False
            torch.cuda.set_stream(stream)  # a failed recording stays in its own
            leave_capture()
            return None
        graph.replay()
        if not all(map(_is_close, outputs, expected)):
            log.warning("the search is not recorded as a CUDA graph: a replay gave other scores")
            self._records = False
            return None
        return _Recorded(graph, buffers, outputs)


def _is_close(replayed: Tensor, computed: Tensor) -> bool:
    """Compares scores; the items of nearly equal scores may change places."""
    if not computed.is_floating_point():
        return replayed.shape == computed.shape
    return torch.allclose(replayed, computed, rtol=1e-2, atol=1e-2)


def leave_capture() -> None:
    """Gives the device's random number generator a new state. After a failed capture the old state would make
    it believe that the capture is still running."""
    fresh = torch.Generator("cuda")
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(fresh.graphsafe_get_state())


def _power_of_two(count: int) -> int:
    """Returns the least power of two that is not below `count`, which is at least 1."""
    return 1 << max(0, count - 1).bit_length()
