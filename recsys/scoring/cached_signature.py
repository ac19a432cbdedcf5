"""Scoring with a cache as functions of flat tensors, which a package compiles besides the whole model.

`PrefillGraph` encodes users and events, `ExtendGraph` appends later events, and `CachedGraph` scores
candidates. The cache passes between them as plain tensors, which `CacheSpec` describes and converts from and
to a `UserCache`.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from recsys import protos as pb
from recsys.config import features
from recsys.models.base import Model, layout_rule
from recsys.models.signature import TensorSpec
from recsys.modules.cache import CacheStage, MixerCache, StageSpec, require_uncut
from recsys.modules.distance_channels import Past
from recsys.modules.precision import COMPUTE_DTYPES
from recsys.modules.prefix import Prefix
from recsys.modules.recurrent_cache import StateStage
from recsys.ops import SequenceLayout, offsets_from_lengths
from recsys.scoring.cache import UserCache
from recsys.scoring.prefill import CachedModel
from recsys.scoring.signature import ROWS, SHORTEST, Assemble, scoring_signature, steps

LENGTHS, USERS, STEPS = "prefix.lengths", "prefix.users", "steps"
"""Names of tensors: lengths and USER features of a `Prefix`, and one whose shape gives the longest sample."""


@dataclass(frozen=True)
class CacheSpec:
    """Describes the tensors of a `UserCache`.

    Attributes:
        num_channels: number of sequences per row.
        num_contextual: number of contextual tokens of each sequence.
        user_width: C, width of the cached USER features; 0 if encoders do not need them.
        dtype: dtype of keys and values, as named in torch.
        stages: the stages of all stacks, stack by stack.
    """

    num_channels: int
    num_contextual: int
    user_width: int
    dtype: str
    stages: list[StageSpec]

    @classmethod
    def of(cls, model: Model) -> "CacheSpec":
        """Describes the caches that `model` produces.

        Raises:
            ValueError: the mixer cannot score with a cache.
        """
        pipeline, cached = model.pipeline, CachedModel(model)
        stages = cached.mixer.cache_stages()
        users = features.columns(pipeline, pb.USER)
        return cls(
            num_channels=len({channel for stage in stages for channel in stage.channels}),
            num_contextual=layout_rule(pipeline).num_contextual,
            user_width=sum(column.width for column in users) if cached.keeps_users else 0,
            dtype=str(COMPUTE_DTYPES[model.precision]).removeprefix("torch."),
            stages=stages,
        )

    @classmethod
    def from_json(cls, entry: dict) -> "CacheSpec":
        """Reverses `to_json`."""
        return cls(**{**entry, "stages": [StageSpec(**stage) for stage in entry["stages"]]})

    def to_json(self) -> dict[str, object]:
        """Returns JSON types, for a file."""
        return asdict(self)

    def specs(self) -> list[TensorSpec]:
        """Describes the tensors in the order of `flatten`."""
        specs = [TensorSpec(LENGTHS, torch.int64, (str(self.num_channels), ROWS))]
        if self.user_width:
            specs.append(TensorSpec(USERS, torch.float32, (ROWS, str(self.user_width))))
        dtype = getattr(torch, self.dtype)
        return specs + [spec for stage in self.stages for spec in stage_tensors(stage, dtype)]

    def flatten(self, cache: UserCache) -> list[Tensor]:
        """Returns the cache's tensors in the order of `specs`."""
        tensors = [cache.prefix.lengths]
        if cache.prefix.users is not None:
            tensors.append(cache.prefix.users)
        return tensors + [tensor for stage in _all_stages(cache) for tensor in stage.tensors]

    def cache(self, inputs: Mapping[str, Tensor]) -> UserCache:
        """Builds the cache from named tensors.

        In a graph, whose inputs include `<stage>.steps`, lengths are trusted. Otherwise they are checked,
        which requires a copy to the host.
        """
        lengths = inputs[LENGTHS]
        prefix = Prefix(lengths, self.num_contextual, inputs.get(USERS))
        dtype = getattr(torch, self.dtype)
        stacks = []
        for _, stages in itertools.groupby(self.stages, key=lambda stage: stage.stack):
            stack = []
            for stage in stages:
                tensors = [inputs[spec.name] for spec in stage_tensors(stage, dtype)]
                times = tensors.pop(0) if stage.has_times else None
                if stage.states:
                    (tokens,) = self._lengths(stage, lengths)
                    past = Past(tokens, self.num_contextual, times)
                    stack.append(StateStage(past, tuple(tensors)))
                    continue
                keys, values = tensors[: stage.num_layers], tensors[stage.num_layers :]
                layout = self._layout(stage, lengths, keys[0], inputs.get(steps_of(stage).name))
                stack.append(CacheStage(layout, times, tuple(keys), tuple(values)))
            stacks.append(tuple(stack))
        return UserCache(prefix, MixerCache(tuple(stacks)))

    def require_uncut(self, cache: UserCache, events: SequenceLayout) -> None:
        """Checks that truncations drop no more tokens when events are appended, which `ExtendGraph` does not.

        Args:
            cache: the cache; its lengths are known on the host.
            events: the sequences of the new events, on the host; tokens other than history do not count.

        Raises:
            NotExtendableError: names the truncation.
        """
        parts = events.parts or (events,)
        for spec, stage in zip(self.stages, _all_stages(cache), strict=True):
            if spec.tail_len is not None and not spec.slides and not spec.states:
                added = torch.cat([parts[channel].num_uih for channel in spec.channels])
                require_uncut(stage.layout.on_host().num_uih + added, spec.tail_len, spec.name)

    def _layout(
        self, stage: StageSpec, lengths: Tensor, keys: Tensor, bound: Tensor | None
    ) -> SequenceLayout:
        by_channel = self._lengths(stage, lengths)
        if bound is None:
            parts = [SequenceLayout(n, None, self.num_contextual) for n in by_channel]
            return SequenceLayout.join(parts) if len(parts) > 1 else parts[0]
        joined = torch.cat(by_channel)
        return SequenceLayout.trusted(
            joined,
            offsets_from_lengths(joined),
            torch.zeros_like(joined),
            self.num_contextual,
            total_len=keys.shape[0],
            max_len=bound.shape[0] + SHORTEST,
            total_targets=0,
        )

    def _lengths(self, stage: StageSpec, lengths: Tensor) -> list[Tensor]:
        """Returns the number of tokens of each sample, int64 [B], in each channel of a stage."""
        by_channel = [lengths[channel] for channel in stage.channels]
        if stage.tail_len is None:
            return by_channel
        return [n.clamp(max=self.num_contextual + stage.tail_len) for n in by_channel]


def stage_tensors(stage: StageSpec, dtype: torch.dtype) -> list[TensorSpec]:
    """Describes a stage's tensors: timestamps if any, then states, or the keys and values of each layer."""
    if stage.states:
        specs = [TensorSpec(f"{stage.name}.newest", torch.int64, (ROWS,))] if stage.has_times else []
        wide = torch.promote_types(dtype, torch.float32)
        for number, shape in enumerate(stage.states):
            specs.append(TensorSpec(f"{stage.name}.state_{number}", wide, (ROWS, *map(str, shape))))
        return specs
    tokens, heads = f"{stage.name}_tokens", str(stage.num_heads)
    specs = [TensorSpec(f"{stage.name}.timestamps", torch.int64, (tokens,))] if stage.has_times else []
    for kind, width in (("keys", stage.qk_dim), ("values", stage.v_dim)):
        for layer in range(stage.num_layers):
            specs.append(TensorSpec(f"{stage.name}.{kind}_{layer}", dtype, (tokens, heads, str(width))))
    return specs


def steps_of(stage: StageSpec) -> TensorSpec:
    """Describes the tensor whose shape gives a stage's longest sample, like `steps` of the scoring graph."""
    return TensorSpec(f"{stage.name}.{STEPS}", torch.int64, (f"{stage.name}_longest",))


def _with_tokens(stages: Iterable[StageSpec]) -> list[StageSpec]:
    """Returns the stages that hold tokens, not states."""
    return [stage for stage in stages if not stage.states]


def prefill_signature(pipeline: pb.Pipeline) -> list[TensorSpec]:
    """Describes the inputs of `PrefillGraph`: those of the scoring graph except the candidates."""
    candidates = _candidate_inputs(pipeline)
    return [spec for spec in scoring_signature(pipeline) if spec.name not in candidates]


def cached_signature(pipeline: pb.Pipeline, cache: CacheSpec) -> list[TensorSpec]:
    """Describes the inputs of `CachedGraph`.

    These are the candidates, the length of the longest candidate list, the cache's tensors, and the length of
    the longest sample of each stage. Lengths are given by shapes, see `steps`.
    """
    names = _candidate_inputs(pipeline)
    candidates = [spec for spec in scoring_signature(pipeline) if spec.name in names or spec.name == STEPS]
    return [*candidates, *cache.specs(), *map(steps_of, _with_tokens(cache.stages))]


def extend_signature(pipeline: pb.Pipeline, cache: CacheSpec) -> list[TensorSpec]:
    """Describes the inputs of `ExtendGraph`: the new events, then the cache as in `cached_signature`."""
    users = {column.name for column in features.columns(pipeline, pb.USER)}
    left_out = users | {f"{name}.counts" for name in users}
    events = [spec for spec in prefill_signature(pipeline) if spec.name not in left_out]
    return [*events, *cache.specs(), *map(steps_of, _with_tokens(cache.stages))]


def cached_inputs(
    pipeline: pb.Pipeline, spec: CacheSpec, inputs: Mapping[str, Tensor], cache: UserCache
) -> tuple[Tensor, ...]:
    """Returns the inputs of `CachedGraph`, in the order of `cached_signature`.

    Args:
        inputs: the inputs of the scoring graph by name, of which only those of candidates are used.
    """
    longest = max(inputs["num_candidates"].tolist(), default=0)
    return _with_cache(cached_signature(pipeline, spec), spec, inputs, cache, longest)


def extend_inputs(
    pipeline: pb.Pipeline, spec: CacheSpec, inputs: Mapping[str, Tensor], cache: UserCache
) -> tuple[Tensor, ...]:
    """Returns the inputs of `ExtendGraph`, in the order of `extend_signature`.

    Args:
        inputs: the inputs of the scoring graph by name, of which only those of events are used.
    """
    longest = max(inputs["uih_lengths"].tolist(), default=0) * layout_rule(pipeline).tokens_per_event
    return _with_cache(extend_signature(pipeline, spec), spec, inputs, cache, longest)


def _with_cache(
    signature: Iterable[TensorSpec],
    spec: CacheSpec,
    inputs: Mapping[str, Tensor],
    cache: UserCache,
    longest: int,
) -> tuple[Tensor, ...]:
    """Returns the tensors of a signature; `longest` is a bound on the number of a row's new tokens."""
    named = dict(inputs) | {STEPS: steps(longest, cache.prefix.lengths.device)}
    named |= {tensor.name: value for tensor, value in zip(spec.specs(), spec.flatten(cache), strict=True)}
    for stage, tensors in zip(spec.stages, _all_stages(cache), strict=True):
        if stage.states:
            continue
        named[steps_of(stage).name] = steps(tensors.layout.max_len, tensors.layout.device)
    return tuple(named[tensor.name] for tensor in signature)


class PrefillGraph(nn.Module):
    """Runs `CachedModel.prefill` from flat tensors to flat tensors.

    Args:
        model: the model, in evaluation mode.
    """

    def __init__(self, model: Model):
        super().__init__()
        self.model, self.cached = model, CachedModel(model)
        self.spec = CacheSpec.of(model)
        self.names = [spec.name for spec in prefill_signature(model.pipeline)]
        self.assemble = Assemble(model.pipeline)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Maps tensors in the order of `prefill_signature` to those of `CacheSpec.specs`."""
        batch = self.assemble(dict(zip(self.names, tensors, strict=True)))
        return tuple(self.spec.flatten(self.cached.prefill(batch)))


class ExtendGraph(nn.Module):
    """Runs `CachedModel.extend` from flat tensors to flat tensors.

    Args:
        model: the model, in evaluation mode.

    Raises:
        NotExtendableError: later events would change every cache; see `CachedModel.require_extendable`.
    """

    def __init__(self, model: Model):
        super().__init__()
        self.model, self.cached = model, CachedModel(model)
        self.cached.require_extendable()
        self.spec = CacheSpec.of(model)
        self.names = [spec.name for spec in extend_signature(model.pipeline, self.spec)]
        self.assemble = Assemble(model.pipeline, has_users=False)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Maps tensors in the order of `extend_signature` to those of `CacheSpec.specs` without `USERS`.

        The caller must call `CacheSpec.require_uncut` first, and USER features stay the same.
        """
        inputs = dict(zip(self.names, tensors, strict=True))
        cache = self.cached.extend(self.assemble(inputs), self.spec.cache(inputs))
        named = zip(self.spec.specs(), self.spec.flatten(cache), strict=True)
        return tuple(tensor for spec, tensor in named if spec.name != USERS)


class CachedGraph(nn.Module):
    """Runs `CachedModel.score` on flat tensors; returns predictions, float32 [N, tasks].

    Args:
        model: the model, in evaluation mode.
    """

    def __init__(self, model: Model):
        super().__init__()
        self.model, self.cached = model, CachedModel(model)
        self.spec = CacheSpec.of(model)
        self.names = [spec.name for spec in cached_signature(model.pipeline, self.spec)]
        self.assemble = Assemble(model.pipeline)

    def forward(self, *tensors: Tensor) -> Tensor:
        """Maps tensors in the order of `cached_signature` to predictions, float32 [N, tasks]."""
        inputs = dict(zip(self.names, tensors, strict=True))
        return self.cached.score(self.assemble(inputs), self.spec.cache(inputs))


def _candidate_inputs(pipeline: pb.Pipeline) -> set[str]:
    names = {"num_candidates", "candidate_timestamps"}
    for column in features.columns(pipeline, pb.CANDIDATE):
        names |= {column.name, f"{column.name}.counts"}
    return names


def _all_stages(cache: UserCache) -> list[CacheStage]:
    return [stage for stack in cache.mixer.stacks for stage in stack]
