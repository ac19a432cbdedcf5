"""Scoring with a cache as two functions of flat tensors: what a package compiles beside the whole model.

`PrefillGraph` makes a cache of users and events, `CachedGraph` scores candidates with it. Between them lie
plain tensors; `CacheForm` says which, and puts a cache together again.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from recsys import protos as pb
from recsys.config import features
from recsys.models.base import layout_rule
from recsys.models.cached import RankerCache
from recsys.models.ranker import Ranker
from recsys.models.scoring import ROWS, SHORTEST, Assemble, TensorSpec, scoring_signature, steps
from recsys.modules.cache import CacheStage, MixerCache, Prefix
from recsys.modules.mixers import HstuMixer, MixtureMixer
from recsys.ops import SequenceLayout, offsets_from_lengths

LENGTHS, USERS, STEPS = "prefix.lengths", "prefix.users", "steps"


@dataclass(frozen=True)
class StageForm:
    """A `CacheStage`: the tokens in front of some neighbouring layers of a stack.

    Attributes:
        name: identifier.
        stack: number of its stack.
        channels: whose tokens, by number.
        num_layers: layers.
        tail_len: history tokens that truncation left; None for all.
        has_times: whether a bias looks at times.
        num_heads, qk_dim, v_dim: shape of a token's keys and values.
    """

    name: str
    stack: int
    channels: list[int]
    num_layers: int
    tail_len: int | None
    has_times: bool
    num_heads: int
    qk_dim: int
    v_dim: int

    def specs(self, dtype: torch.dtype) -> list[TensorSpec]:
        """Its tensors: times if there are any, keys of each layer, values of each layer."""
        tokens, heads = f"{self.name}_tokens", str(self.num_heads)
        found = [TensorSpec(f"{self.name}.timestamps", torch.int64, (tokens,))] if self.has_times else []
        for kind, width in (("keys", self.qk_dim), ("values", self.v_dim)):
            for layer in range(self.num_layers):
                found.append(TensorSpec(f"{self.name}.{kind}_{layer}", dtype, (tokens, heads, str(width))))
        return found

    def steps_spec(self) -> TensorSpec:
        """Its longest sample, as `steps` of the scoring graph."""
        return TensorSpec(f"{self.name}.{STEPS}", torch.int64, (f"{self.name}_longest",))


@dataclass(frozen=True)
class CacheForm:
    """The tensors of a `RankerCache`.

    Attributes:
        num_channels: sequences of a row.
        num_contextual: contextual tokens of each.
        user_width: C, width of the USER features that are kept; 0 where none are.
        dtype: of keys and values, as torch calls it.
        stages: of all stacks, in order.
    """

    num_channels: int
    num_contextual: int
    user_width: int
    dtype: str
    stages: list[StageForm]

    @classmethod
    def of(cls, model: Ranker) -> "CacheForm":
        """That of a model's caches.

        Raises:
            ValueError: the mixer keeps none.
        """
        preprocess, pipeline = model.preprocess, model.pipeline
        users = features.columns(pipeline, pb.USER)
        stacks = _stacks(model.mix)
        return cls(
            num_channels=sum(len(channels) for channels, _ in stacks),
            num_contextual=layout_rule(pipeline).num_contextual,
            user_width=sum(column.width for column in users) if preprocess.contextualized else 0,
            dtype="bfloat16" if model.precision == pb.BF16 else "float32",
            stages=[
                stage
                for number, (channels, mixer) in enumerate(stacks)
                for stage in _stages(number, channels, mixer)
            ],
        )

    @classmethod
    def from_json(cls, entry: dict) -> "CacheForm":
        """The reverse of `to_json`."""
        return cls(**{**entry, "stages": [StageForm(**stage) for stage in entry["stages"]]})

    def to_json(self) -> dict[str, object]:
        """Plain types, for a file."""
        return asdict(self)

    def specs(self) -> list[TensorSpec]:
        """The tensors in order: what `flatten` gives."""
        found = [TensorSpec(LENGTHS, torch.int64, (str(self.num_channels), ROWS))]
        if self.user_width:
            found.append(TensorSpec(USERS, torch.float32, (ROWS, str(self.user_width))))
        dtype = getattr(torch, self.dtype)
        return found + [spec for stage in self.stages for spec in stage.specs(dtype)]

    def flatten(self, cache: RankerCache) -> list[Tensor]:
        """Its tensors in the order of `specs`."""
        found = [cache.prefix.lengths]
        if cache.prefix.users is not None:
            found.append(cache.prefix.users)
        return found + [tensor for stage in _all(cache) for tensor in stage.tensors]

    def cache(self, inputs: Mapping[str, Tensor]) -> RankerCache:
        """The cache of named tensors.

        In a graph, where `<stage>.steps` are among them, lengths are trusted; else they are checked, which
        costs a copy to the host.
        """
        lengths = inputs[LENGTHS]
        prefix = Prefix(lengths, self.num_contextual, inputs.get(USERS))
        dtype = getattr(torch, self.dtype)
        stacks = []
        for _, stages in itertools.groupby(self.stages, key=lambda stage: stage.stack):
            stack = []
            for form in stages:
                tensors = [inputs[spec.name] for spec in form.specs(dtype)]
                times = tensors.pop(0) if form.has_times else None
                keys, values = tensors[: form.num_layers], tensors[form.num_layers :]
                bound = inputs.get(form.steps_spec().name)
                layout = self._layout(form, lengths, keys[0], bound)
                stack.append(CacheStage(layout, times, tuple(keys), tuple(values)))
            stacks.append(tuple(stack))
        return RankerCache(prefix, MixerCache(tuple(stacks)))

    def _layout(self, form: StageForm, lengths: Tensor, keys: Tensor, bound: Tensor | None) -> SequenceLayout:
        own = [lengths[channel] for channel in form.channels]
        if form.tail_len is not None:
            own = [one.clamp(max=self.num_contextual + form.tail_len) for one in own]
        if bound is None:
            parts = [SequenceLayout(one, None, self.num_contextual) for one in own]
            return SequenceLayout.join(parts) if len(parts) > 1 else parts[0]
        flat = torch.cat(own)
        return SequenceLayout.trusted(
            flat,
            offsets_from_lengths(flat),
            torch.zeros_like(flat),
            self.num_contextual,
            total_len=keys.shape[0],
            max_len=bound.shape[0] + SHORTEST,
            total_targets=0,
        )


def prefill_signature(pipeline: pb.Pipeline) -> list[TensorSpec]:
    """Inputs of `PrefillGraph`: those of the scoring graph, less what is of candidates."""
    asked = _of_candidates(pipeline)
    return [spec for spec in scoring_signature(pipeline) if spec.name not in asked]


def cached_signature(pipeline: pb.Pipeline, form: CacheForm) -> list[TensorSpec]:
    """Inputs of `CachedGraph`: candidates, the longest list of them, the cache, its longest samples."""
    asked = _of_candidates(pipeline)
    whole = scoring_signature(pipeline)
    candidates = [spec for spec in whole if spec.name in asked or spec.name == STEPS]
    return [*candidates, *form.specs(), *(stage.steps_spec() for stage in form.stages)]


def cached_inputs(
    pipeline: pb.Pipeline, form: CacheForm, inputs: Mapping[str, Tensor], cache: RankerCache
) -> tuple[Tensor, ...]:
    """The inputs of `CachedGraph`.

    Args:
        inputs: of the scoring graph, by name; only those of candidates are taken.
    """
    longest = max(inputs["num_candidates"].tolist(), default=0)
    named = dict(inputs) | {STEPS: steps(longest, cache.prefix.lengths.device)}
    named |= {spec.name: tensor for spec, tensor in zip(form.specs(), form.flatten(cache), strict=True)}
    for stage, kept in zip(form.stages, _all(cache), strict=True):
        named[stage.steps_spec().name] = steps(kept.layout.max_len, kept.layout.device)
    return tuple(named[spec.name] for spec in cached_signature(pipeline, form))


class PrefillGraph(nn.Module):
    """`Ranker.prefill` from and to flat tensors.

    Args:
        model: in evaluation mode.
    """

    def __init__(self, model: Ranker):
        super().__init__()
        self.model = model
        self.form = CacheForm.of(model)
        self.names = [spec.name for spec in prefill_signature(model.pipeline)]
        self.assemble = Assemble(model.pipeline)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Tensors as `prefill_signature` lists them to those of `CacheForm.specs`."""
        batch = self.assemble(dict(zip(self.names, tensors, strict=True)))
        return tuple(self.form.flatten(self.model.prefill(batch)))


class CachedGraph(nn.Module):
    """`Ranker.score_cached` from flat tensors: predictions [N, tasks].

    Args:
        model: in evaluation mode.
    """

    def __init__(self, model: Ranker):
        super().__init__()
        self.model = model
        self.form = CacheForm.of(model)
        self.names = [spec.name for spec in cached_signature(model.pipeline, self.form)]
        self.assemble = Assemble(model.pipeline)

    def forward(self, *tensors: Tensor) -> Tensor:
        """Tensors as `cached_signature` lists them."""
        inputs = dict(zip(self.names, tensors, strict=True))
        return self.model.score_cached(self.assemble(inputs), self.form.cache(inputs))


def _of_candidates(pipeline: pb.Pipeline) -> set[str]:
    found = {"num_candidates", "candidate_timestamps"}
    for column in features.columns(pipeline, pb.CANDIDATE):
        found |= {column.name, f"{column.name}.counts"}
    return found


def _stacks(mix: nn.Module) -> list[tuple[list[int], HstuMixer]]:
    """Of each stack, or of several that run in step, the channels and one of them."""
    if isinstance(mix, MixtureMixer):
        return [(members, mix.stacks[members[0]]) for members in mix.together]
    if isinstance(mix, HstuMixer):
        return [([0], mix)]
    raise ValueError(f"{type(mix).__name__} keeps no cache; choose hstu or mixture")


def _stages(number: int, channels: Sequence[int], mixer: HstuMixer) -> list[StageForm]:
    starts = [layer for layer, rule in enumerate(mixer.rules) if layer == 0 or rule.tail_len is not None]
    return [
        StageForm(
            name=f"stack_{number}_stage_{stage}",
            stack=number,
            channels=list(channels),
            num_layers=end - start,
            tail_len=mixer.rules[start].tail_len,
            has_times=len(mixer.biases) > 0,
            num_heads=mixer.num_heads,
            qk_dim=mixer.qk_dim,
            v_dim=mixer.v_dim,
        )
        for stage, (start, end) in enumerate(itertools.pairwise([*starts, len(mixer.rules)]))
    ]


def _all(cache: RankerCache) -> list[CacheStage]:
    return [stage for stack in cache.mixer.stacks for stage in stack]
