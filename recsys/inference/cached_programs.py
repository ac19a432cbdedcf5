"""The two programs of a package that score with a cache, compiled and loaded.

    prefill.pt2          users and events to a cache, as flat tensors
    cached.pt2           candidates and such tensors to scores
    weights.safetensors  of all programs of the package, the whole model's too: held once, in files and memory

Between two calls a cache is a `RankerCache`, which can be cut into users and moved.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from recsys import protos as pb
from recsys.data.batch import Batch
from recsys.inference.program import Program
from recsys.models.cached import RankerCache
from recsys.models.ranker import Ranker
from recsys.models.scoring import CANDIDATES, LONGEST, ROWS, flatten, scoring_signature
from recsys.models.signature import TensorSpec
from recsys.scoring.cached_scoring import (
    CachedGraph,
    CacheForm,
    PrefillGraph,
    cached_inputs,
    cached_signature,
    prefill_signature,
)

PREFILL, CACHED, WEIGHTS = "prefill.pt2", "cached.pt2", "weights.safetensors"

Compile = Callable[[torch.nn.Module, list[TensorSpec], tuple[Tensor, ...], str], None]
"""Compiles a graph, given its inputs and an example of them, to a file of this name."""


_USUAL, _MANY = {ROWS: 40, CANDIDATES: 1000, LONGEST: 200}, 4000
"""Sizes by which a compiler judges what is worth running on several threads."""

Run = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
"""A program."""


@dataclass
class CachedDescription:
    """What `package.json` says of them.

    Attributes:
        prefill: name, dtype and named dims of every input of `prefill.pt2`, in order.
        cached: those of `cached.pt2`.
        form: of the cache, `CacheForm.to_json`.
    """

    prefill: list[dict]
    cached: list[dict]
    form: dict

    @classmethod
    def of(cls, model: Ranker) -> "CachedDescription":
        """That of a model's programs."""
        form = CacheForm.of(model)
        return cls(
            prefill=[spec.to_json() for spec in prefill_signature(model.pipeline)],
            cached=[spec.to_json() for spec in cached_signature(model.pipeline, form)],
            form=form.to_json(),
        )


class CachedPrograms:
    """Both programs, ready to run.

    Args:
        pipeline: resolved config of the package.
        form: of the cache.
        prefill, cached: the programs, from flat inputs to flat outputs.
    """

    def __init__(self, pipeline: pb.Pipeline, form: CacheForm, prefill: Run, cached: Run):
        self._pipeline, self._form = pipeline, form
        self._run_prefill, self._run_cached = prefill, cached
        self._names = [spec.name for spec in scoring_signature(pipeline)]
        self._prefill_names = [spec.name for spec in prefill_signature(pipeline)]

    @classmethod
    def load(
        cls,
        folder: Path,
        description: CachedDescription,
        pipeline: pb.Pipeline,
        device: torch.device,
        op_libraries: Sequence[str],
        weights: Mapping[str, Tensor],
    ) -> "CachedPrograms":
        """Those of a package.

        Args:
            description: its entry in `package.json`.
            device: that it was compiled for.
            op_libraries: modules that register operators.
            weights: of all programs.
        """

        def program(name: str, entries: list[dict]) -> Program:
            specs = [TensorSpec.from_json(entry) for entry in entries]
            return Program(folder / name, specs, device, op_libraries, weights)

        form = CacheForm.from_json(description.form)
        programs = program(PREFILL, description.prefill), program(CACHED, description.cached)
        return cls(pipeline, form, *programs)

    def prefill(self, batch: Batch) -> RankerCache:
        """What candidates look at of each row, on the package's device; candidates of the batch are left
        alone.
        """
        return self._fill(self._named(batch))

    def score(self, batch: Batch, cache: RankerCache) -> Tensor:
        """float32 [N, tasks] on the package's device, perhaps still being computed: row b has candidates of
        user b of the cache; nothing else of the batch is looked at.
        """
        return self._score(self._named(batch), cache)

    def run_flat(self, inputs: Sequence[Tensor]) -> Tensor:
        """One after the other, from the inputs of the whole model's program."""
        named = dict(zip(self._names, inputs, strict=True))
        return self._score(named, self._fill(named)).cpu()

    def _named(self, batch: Batch) -> dict[str, Tensor]:
        return dict(zip(self._names, flatten(batch), strict=True))

    def _fill(self, named: Mapping[str, Tensor]) -> RankerCache:
        tensors = self._run_prefill([named[name] for name in self._prefill_names])
        specs = self._form.specs()
        return self._form.cache({spec.name: one for spec, one in zip(specs, tensors, strict=True)})

    def _score(self, named: Mapping[str, Tensor], cache: RankerCache) -> Tensor:
        (output,) = self._run_cached(cached_inputs(self._pipeline, self._form, named, cache))
        return output.float()


def compile_programs(model: Ranker, compile_to: Compile) -> None:
    """Compiles both programs of a model in evaluation mode, for the device that it is on."""
    pipeline, form = model.pipeline, CacheForm.of(model)
    device = next(model.parameters()).device
    for graph, specs, name in (
        (PrefillGraph(model), prefill_signature(pipeline), PREFILL),
        (CachedGraph(model), cached_signature(pipeline, form), CACHED),
    ):
        compile_to(graph, specs, example_inputs(specs, device), name)


def example_inputs(specs: Sequence[TensorSpec], device: torch.device) -> tuple[Tensor, ...]:
    """Tensors of zeros, of which a capture sees the sizes only: a usual one for each dim, no two alike.

    Real rows could have an empty list or a channel without events, and a compiler would take their size for
    the only one.
    """
    names = sorted({name for spec in specs for name in spec.dims if not name.isdigit()})
    sizes = {name: _USUAL.get(name, _MANY) + place for place, name in enumerate(names)}
    return tuple(
        torch.zeros([sizes.get(name) or int(name) for name in spec.dims], dtype=spec.dtype, device=device)
        for spec in specs
    )
