"""Compiles and runs the programs of a package that score with a cache.

    prefill.pt2          maps users and events to a cache, as flat tensors
    extend.pt2           maps later events and a cache to a new cache, of models whose caches can be extended
    cached.pt2           maps candidates and a cache to scores
    weights.safetensors  weights of all programs of the package, stored once on disk and in memory

Between two calls a cache is a `UserCache`, which can be moved and from which users can be selected.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from recsys import protos as pb
from recsys.data.batch import Batch
from recsys.models.base import Model, layout_rule
from recsys.models.signature import TensorSpec
from recsys.modules.cache import NotExtendableError
from recsys.scoring.cache import UserCache
from recsys.scoring.cached_signature import (
    USERS,
    CachedGraph,
    CacheSpec,
    ExtendGraph,
    PrefillGraph,
    cached_inputs,
    cached_signature,
    extend_inputs,
    extend_signature,
    prefill_signature,
)
from recsys.scoring.flat_events import events_between
from recsys.scoring.padded_inputs import padded_cached_inputs
from recsys.scoring.prefill import CachedModel
from recsys.scoring.recorded import RecordedScoring
from recsys.scoring.signature import example_inputs, flatten, scoring_signature

PREFILL, EXTEND, CACHED, WEIGHTS = "prefill.pt2", "extend.pt2", "cached.pt2", "weights.safetensors"

Compile = Callable[[torch.nn.Module, list[TensorSpec], tuple[Tensor, ...], str], bool]
"""Compiles a graph, given the specs of its inputs and an example, to a file of the given name."""

Run = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
"""A compiled program, which maps flat inputs to flat outputs."""

log = logging.getLogger(__name__)


@dataclass
class CachedDescription:
    """The entry of these programs in `package.json`.

    Attributes:
        prefill: name, dtype and named dims of every input of `prefill.pt2`, in order.
        cached: the same for `cached.pt2`.
        form: the tensors of a cache, as `CacheSpec.to_json` describes them.
        extend: the same as `prefill` for `extend.pt2`; None if there is no such program, as in older packages
            and where later events would change every cache.
    """

    prefill: list[dict]
    cached: list[dict]
    form: dict
    extend: list[dict] | None = None

    @classmethod
    def of(cls, model: Model) -> "CachedDescription":
        """Describes the programs of a model."""
        cache, extend = CacheSpec.of(model), None
        if CachedModel(model).extends:
            extend = [spec.to_json() for spec in extend_signature(model.pipeline, cache)]
        return cls(
            prefill=[spec.to_json() for spec in prefill_signature(model.pipeline)],
            cached=[spec.to_json() for spec in cached_signature(model.pipeline, cache)],
            form=cache.to_json(),
            extend=extend,
        )

    def to_json(self) -> dict[str, object]:
        """Returns the entry, which lacks `extend` if there is no such program."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class CachedPrograms:
    """Runs these programs.

    Args:
        pipeline: the resolved config of the package.
        cache_spec: describes the tensors of a cache.
        prefill, cached, extend: the programs, which map flat inputs to flat outputs; `extend` may be missing.

    Attributes:
        cache_spec: describes the tensors of a cache.
    """

    def __init__(
        self,
        pipeline: pb.Pipeline,
        cache_spec: CacheSpec,
        prefill: Run,
        cached: Run,
        extend: Run | None = None,
    ):
        self._pipeline, self.cache_spec = pipeline, cache_spec
        self._run_prefill, self._run_cached, self._run_extend = prefill, cached, extend
        self._names = [spec.name for spec in scoring_signature(pipeline)]
        self._prefill_names = [spec.name for spec in prefill_signature(pipeline)]
        self._rule = layout_rule(pipeline)

    @classmethod
    def load(
        cls,
        description: CachedDescription,
        pipeline: pb.Pipeline,
        load_program: Callable[[str, list[dict]], Run],
    ) -> "CachedPrograms":
        """Loads the programs of a package.

        Args:
            description: the programs' entry in `package.json`.
            pipeline: the resolved config of the package.
            load_program: loads a program, given its file's name and its inputs as JSON.
        """
        cache_spec = CacheSpec.from_json(description.form)
        prefill = load_program(PREFILL, description.prefill)
        cached = load_program(CACHED, description.cached)
        extend = None if description.extend is None else load_program(EXTEND, description.extend)
        return cls(pipeline, cache_spec, prefill, cached, extend)

    def record(self, device: torch.device) -> None:
        """Lets a GPU replay recorded graphs of `score`, whose program must be recordable."""
        run, padded = self._run_cached, padded_cached_inputs(self._pipeline, self.cache_spec)
        recorded = RecordedScoring(lambda *inputs: run(inputs), padded, device, CACHED)
        self._run_cached = lambda inputs: recorded(*inputs)

    @property
    def extends(self) -> bool:
        """Whether `extend` can be called."""
        return self._run_extend is not None

    def prefill(self, batch: Batch) -> UserCache:
        """Encodes users and histories on the package's device. Candidates of the batch are ignored."""
        return self._fill(self._named(batch))

    def extend(self, batch: Batch, cache: UserCache) -> UserCache:
        """Returns the cache of the same users with later events appended; `cache` does not change.

        Args:
            batch: row b has the new events of user b of the cache, any number, oldest first. Users and
                candidates are ignored.

        Raises:
            NotExtendableError: there is no such program, or a truncation would drop more events than before.
        """
        self.cache_spec.require_uncut(cache, batch.sequences)
        return self._extend(self._named(batch), cache)

    def score(self, batch: Batch, cache: UserCache) -> Tensor:
        """Scores candidates, float32 [N, tasks] on the package's device, possibly still being computed.

        Args:
            batch: row b has candidates of user b of the cache. Users and events are ignored.
        """
        return self._score(self._named(batch), cache)

    def run_flat(self, inputs: Sequence[Tensor]) -> Tensor:
        """Runs `prefill` and `score` on the flat inputs of the whole model; the scores are on the host."""
        named = dict(zip(self._names, inputs, strict=True))
        return self._score(named, self._fill(named)).cpu()

    def run_flat_extended(self, inputs: Sequence[Tensor]) -> Tensor:
        """Runs `prefill` on the older events, `extend` on up to two newer ones of each row, and `score`.

        A row that a truncation shortens has no newer events, unless this changes nothing.
        """
        named = dict(zip(self._names, inputs, strict=True))
        count = named["uih_lengths"]
        stages = [stage for stage in self.cache_spec.stages if not stage.slides]
        bounds = [stage.tail_len for stage in stages if stage.tail_len is not None]
        is_short = count * self._rule.tokens_per_event <= min(bounds, default=torch.inf)
        newer = torch.minimum(count, torch.arange(1, len(count) + 1) % 3) * is_short
        older = events_between(self._pipeline, named, torch.zeros_like(count), count - newer)
        newest = events_between(self._pipeline, named, count - newer, count)
        return self._score(named, self._extend(newest, self._fill(older))).cpu()

    def _named(self, batch: Batch) -> dict[str, Tensor]:
        return dict(zip(self._names, flatten(batch), strict=True))

    def _fill(self, named: Mapping[str, Tensor]) -> UserCache:
        tensors = self._run_prefill([named[name] for name in self._prefill_names])
        names = [spec.name for spec in self.cache_spec.specs()]
        return self.cache_spec.cache(dict(zip(names, tensors, strict=True)))

    def _extend(self, named: Mapping[str, Tensor], cache: UserCache) -> UserCache:
        if self._run_extend is None:
            raise NotExtendableError("the package has no program that extends caches")
        tensors = self._run_extend(extend_inputs(self._pipeline, self.cache_spec, named, cache))
        names = [spec.name for spec in self.cache_spec.specs() if spec.name != USERS]
        extended = dict(zip(names, tensors, strict=True)) | {USERS: cache.prefix.users}
        return self.cache_spec.cache(extended)

    def _score(self, named: Mapping[str, Tensor], cache: UserCache) -> Tensor:
        (output,) = self._run_cached(cached_inputs(self._pipeline, self.cache_spec, named, cache))
        return output.float()


def compile_programs(model: Model, compile_to: Compile) -> None:
    """Compiles the programs of a model in evaluation mode, for the model's device."""
    pipeline, cache = model.pipeline, CacheSpec.of(model)
    device = next(model.parameters()).device
    graphs = [
        (PrefillGraph(model), prefill_signature(pipeline), PREFILL),
        (CachedGraph(model), cached_signature(pipeline, cache), CACHED),
    ]
    try:
        graphs.append((ExtendGraph(model), extend_signature(pipeline, cache), EXTEND))
    except NotExtendableError as error:
        log.info("a store of users will encode histories that grow again: %s", error)
    for graph, specs, name in graphs:
        compile_to(graph, specs, example_inputs(specs, device), name)
