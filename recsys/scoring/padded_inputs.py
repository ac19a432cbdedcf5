"""Copies the inputs of scoring graphs into buffers of a few sizes, whose rest belongs to filler rows.

A recorded CUDA graph reads the same memory and the same sizes in each replay. Filler rows, behind all rows of
the inputs, take up the events, candidates and ids that the buffers have beyond those of the inputs. Cached
tokens need none: their samples simply end before the buffers do.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from recsys import protos as pb
from recsys.config.declarations import model_of
from recsys.models.base import layout_rule
from recsys.models.signature import TensorSpec
from recsys.scoring.cached_signature import CacheSpec, cached_signature
from recsys.scoring.signature import CANDIDATES, EVENTS, LONGEST, ROWS, SEEN, SHORTEST
from recsys.scoring.static_buffers import StaticBuffers

LEAST = 64
"""The least distance of padded sizes: as many tokens cost a GPU next to nothing."""

LEAST_CACHED = 256
"""The least number of cached tokens of padded inputs."""

_TOTALS = {"uih_lengths": EVENTS, "num_candidates": CANDIDATES, "seen_lengths": SEEN}
"""By the name of an input that has a number for each row: the dimension that is the sum of these numbers."""


class Sizes(NamedTuple):
    """The sizes of padded inputs.

    Attributes:
        fillers: number of rows at the end that divide what is added to the inputs.
        dims: the size of each named dimension, fillers included, sorted by name.
    """

    fillers: int
    dims: tuple[tuple[str, int], ...]


class PaddedInputs:
    """Chooses a few sizes for the inputs of a graph, and allocates buffers of these sizes.

    Args:
        pipeline: the resolved config.
        specs: the inputs, as in `scoring_signature` or `cached_signature`.
        cached: names of the inputs that are tensors of a cache, which lie on the device already.
    """

    def __init__(
        self, pipeline: pb.Pipeline, specs: Sequence[TensorSpec], cached: Collection[str] = ()
    ) -> None:
        self.specs = list(specs)
        self._rule, self._max_events = layout_rule(pipeline), max(1, pipeline.data.max_history_len)
        self._beams, self._width = model_of(pipeline).num_found or 0, pipeline.model.embedding_dim
        dims = {spec.name: spec.dims for spec in specs}
        # Only the shapes of these inputs are read.
        self._bounds = {spec.name for spec in specs if spec.dims[0].endswith(LONGEST)}
        self._cached = frozenset(cached)
        self._tokens = {dim for name in cached if (dim := dims[name][0]) != ROWS and not dim.isdigit()}
        self._totals = {name: total for name, total in _TOTALS.items() if name in dims}
        for channel in self._rule.channels:
            events = dims.get(f"channel.{channel.name}.events")
            if events is not None:
                self._totals[f"channel.{channel.name}.lengths"] = events[0]
        # By the input with the number of ids of each entry: dimensions of the ids and of the entries.
        suffix = ".counts"
        counts = {name: name.removesuffix(suffix) for name in dims if name.endswith(suffix)}
        self._ids = {name: (dims[ids][0], dims[name][0]) for name, ids in counts.items() if ids in dims}
        self._memory: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    @property
    def of_rows(self) -> str:
        """The dimension of the graph's outputs: candidates if it has any, else rows."""
        return CANDIDATES if CANDIDATES in self._totals.values() else ROWS

    def dims(self, inputs: Sequence[Tensor]) -> dict[str, int]:
        """Returns the sizes of named dimensions."""
        pairs = zip(self.specs, inputs, strict=True)
        sizes = {name: n for spec, tensor in pairs for name, n in zip(spec.dims, tensor.shape, strict=True)}
        return {name: size for name, size in sizes.items() if not name.isdigit()}

    def sizes(self, inputs: Sequence[Tensor]) -> Sizes:
        """Returns the sizes to which inputs are padded: a few for inputs of similar sizes."""
        exact = self.dims(inputs)
        padded = {name: _rounded(exact[name]) for name in self._totals.values()}
        for ids, entries in self._ids.values():  # whole ids for each entry, so that there are few sizes
            width = padded.get(entries) or _power_of_two(exact[ROWS])
            padded[ids] = (exact[ids] // width + 1) * width
        padded |= {name: _power_of_two(max(exact[name], LEAST_CACHED)) for name in self._tokens}
        num_contextual = self._rule.num_contextual if EVENTS in padded else 0
        longest = _rounded(max(exact[LONGEST] + SHORTEST, num_contextual + LEAST))
        padded |= {
            name: _power_of_two(max(size, LEAST_CACHED))
            for name, size in exact.items()
            if name.endswith(LONGEST)
        }
        padded[LONGEST] = longest - SHORTEST
        fillers = self._num_fillers(exact, longest - num_contextual)
        padded[ROWS] = _power_of_two(exact[ROWS]) + fillers
        return Sizes(fillers, tuple(sorted(padded.items())))

    def entries(self, sizes: Sizes) -> int:
        """Returns the number of entries of a call: (tokens, cached ones too, + beams of all rows) x width."""
        size = dict(sizes.dims)
        events = [size[name] for name in self._totals.values() if name not in (CANDIDATES, SEEN)]
        tokens = sum(events) * self._rule.tokens_per_event + size.get(CANDIDATES, 0)
        tokens += sum(size[name] for name in self._tokens)
        return (tokens + size[ROWS] * (self._rule.num_contextual + self._beams)) * self._width

    def buffers(self, sizes: Sizes, device: torch.device) -> "Buffers":
        """Allocates buffers. Those of a cache are shared by all sizes that can share them."""
        size, forms, whole = dict(sizes.dims), {}, {}
        for spec in self.specs:
            shape = tuple(size.get(name) or int(name) for name in spec.dims)
            if spec.name in self._cached:
                key = (spec.name, shape)
                if key not in self._memory:
                    self._memory[key] = torch.zeros(shape, dtype=spec.dtype, device=device)
                whole[spec.name] = self._memory[key]
            elif spec.name in self._bounds:
                whole[spec.name] = torch.zeros(shape, dtype=spec.dtype, device=device)
            else:
                forms[spec.name] = (shape, spec.dtype)
        return Buffers(self, sizes, StaticBuffers(forms, device), whole)

    def fill_host(self, inputs: dict[str, Tensor], sizes: Sizes, arrays: dict[str, np.ndarray]) -> None:
        """Copies inputs to the front of arrays of zeros, and divides the rest among the fillers."""
        size = dict(sizes.dims)
        for name, array in arrays.items():
            array[: len(inputs[name])] = inputs[name].numpy(force=True)
        for name, total in self._totals.items():
            array = arrays[name]
            array[-sizes.fillers :] = _shares(size[total] - int(array.sum()), sizes.fillers)
        for name, (ids, _) in self._ids.items():
            array, start = arrays[name], len(inputs[name])
            array[start:] = _shares(size[ids] - int(array.sum()), len(array) - start)

    def fill_cache(self, inputs: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
        """Copies the tensors of a cache to the front of buffers; rows that are added get zeros."""
        copies: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for spec in self.specs:
            if spec.name in self._cached:
                tensor, buffer = inputs[spec.name], buffers[spec.name]
                if ROWS in spec.dims:
                    buffer.zero_()
                targets, sources = copies.setdefault(tensor.dtype, ([], []))
                targets.append(buffer[tuple(slice(size) for size in tensor.shape)])
                sources.append(tensor)
        for targets, sources in copies.values():  # a kernel for all layers
            torch._foreach_copy_(targets, sources, non_blocking=True)

    def _num_fillers(self, exact: dict[str, int], longest: int) -> int:
        """Returns a number of filler rows for which none has more than `longest` events and candidates, or
        more events than a history may have."""
        events = [_step(exact[n]) for n in self._totals.values() if n not in (CANDIDATES, SEEN)]
        most = max(events, default=0)
        tokens = most * self._rule.tokens_per_event
        tokens += _step(exact[CANDIDATES]) if CANDIDATES in exact else 0
        room = longest - self._rule.tokens_per_event - 1  # shares are rounded up
        return max(1, -(-tokens // room), -(-most // self._max_events))


def padded_cached_inputs(pipeline: pb.Pipeline, cache: CacheSpec) -> PaddedInputs:
    """Returns the padded inputs of `CachedGraph`."""
    return PaddedInputs(pipeline, cached_signature(pipeline, cache), {spec.name for spec in cache.specs()})


class Buffers:
    """Memory that a recorded graph reads.

    Attributes:
        tensors: the inputs of the graph, in the order of its signature.
    """

    def __init__(
        self, inputs: PaddedInputs, sizes: Sizes, static: StaticBuffers[str], whole: dict[str, Tensor]
    ) -> None:
        self._inputs, self._sizes, self._static, self._whole = inputs, sizes, static, whole
        named = static.tensors | whole
        self.tensors = tuple(named[spec.name] for spec in inputs.specs)

    def fill(self, inputs: Sequence[Tensor]) -> None:
        """Copies inputs into the buffers; those on the host in one transfer. Nothing waits for a device."""
        specs = self._inputs.specs
        named = {spec.name: tensor for spec, tensor in zip(specs, inputs, strict=True)}
        with self._static.filling() as arrays:
            self._inputs.fill_host(named, self._sizes, arrays)
        self._inputs.fill_cache(named, self._whole)


def _shares(count: int, parts: int) -> np.ndarray:
    """Divides a count into nearly equal parts, int64 [parts]; none is above the quotient rounded up."""
    return np.diff(count * np.arange(parts + 1) // parts)


def _step(count: int) -> int:
    """Returns the distance of padded sizes near `count`: at most a quarter of it, or `LEAST`."""
    return max(LEAST, 1 << max(0, count.bit_length() - 3))


def _rounded(count: int) -> int:
    """Rounds up to one of a few sizes, at least to `count` + 1."""
    step = _step(count)
    return (count // step + 1) * step


def _power_of_two(count: int) -> int:
    """Returns the least power of two that is not below `count`, which is at least 1."""
    return 1 << max(0, count - 1).bit_length()
