"""`HstuMixer`: a stack of sequential transduction units (STU layers, arXiv 2402.17152)."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from recsys import protos as pb
from recsys.config.registry import register
from recsys.modules.cache import CachingMixer, Encoded, MixerCache, StageSpec
from recsys.modules.mixers import cached_stack
from recsys.modules.mixers.base import AttentionUse, Mixer
from recsys.modules.mixers.batched_layers import finish, project, to_compute_dtype
from recsys.modules.mixers.rules import LayerRule, layer_rules, stack_flops
from recsys.modules.precision import COMPUTE_DTYPES
from recsys.modules.relative_bias import RelativeBiasTables
from recsys.modules.sequence import JaggedSequence, join
from recsys.modules.stochastic_depth import StochasticDepth, linear_schedule
from recsys.modules.stu import STUConfig, STULayer
from recsys.ops import AttentionMask, RelativeBias, SequenceLayout, hstu_attention, hstu_attention_cached
from recsys.ops.attention_args import AttentionFacts, is_deterministic
from recsys.ops.hstu_attention import OP as HSTU_ATTENTION
from recsys.ops.hstu_attention import Problem, attend

_ACTIVATION = {pb.HstuMixer.U: "u", pb.HstuMixer.UVQK: "uvqk"}
_NORM = {pb.HstuMixer.LAYER_NORM: "layer", pb.HstuMixer.GROUP_NORM: "group"}
_GATE = {pb.HstuMixer.UGN: "ugn", pb.HstuMixer.CONCAT: "concat"}
_RECOMPUTE = {pb.NORMED_X: "normed_x", pb.UVQK: "uvqk", pb.GATED: "gated"}

MOST_KEPT = 0.75
"""Before a truncation, a layer skips the dropped tokens if at most this share of tokens is kept.

Skipping saves their computation but has to move rows. The value is not tuned.
"""


@register(pb.HstuMixer)
class HstuMixer(Mixer, CachingMixer):
    """Stacks layers of equal config, each with its own mask and bias tables. Truncations may precede layers.

    Args:
        config: the resolved message (with `v_dim`, `scale_len` and `bias.num_positions`, lengths in tokens).
        embedding_dim: E.

    Raises:
        ValueError: invalid layer groups; see `layer_rules`.
    """

    casts_residual = True
    rotary = None

    def __init__(self, config: pb.HstuMixer, *, embedding_dim: int):
        super().__init__()
        self.rules = layer_rules(config)
        self.embedding_dim = embedding_dim
        self.num_heads, self.qk_dim, self.v_dim = config.num_heads, config.qk_dim, config.v_dim
        self.layers = nn.ModuleList(_layer(config, embedding_dim) for _ in self.rules)
        self.biases = nn.ModuleList()
        if config.HasField("bias"):
            heads = config.num_heads if config.bias.per_head else None
            for _ in self.layers:
                self.biases.append(
                    RelativeBiasTables(config.bias.num_positions, config.bias.num_time_buckets, heads)
                )
        self.reads_times = config.bias.num_time_buckets > 0 if config.HasField("bias") else False
        schedule = linear_schedule(config.stochastic_depth, len(self.layers))
        self.depths = nn.ModuleList(StochasticDepth(probability) for probability in schedule)
        self.input_dropout = nn.Dropout(config.input_dropout)
        self.output_dropout = nn.Dropout(config.output_dropout)
        self.attention_width = config.num_heads * (config.qk_dim + config.v_dim)
        self.scale_len, self.backend = config.scale_len, config.backend
        self.alpha = config.alpha if config.HasField("alpha") else config.qk_dim**-0.5
        self.deterministic = config.deterministic if config.HasField("deterministic") else None
        self.attention = partial(
            hstu_attention,
            alpha=self.alpha,
            scale_len=config.scale_len,
            backend=config.backend,
            deterministic=self.deterministic,
        )
        self.cached_attention = partial(
            hstu_attention_cached, alpha=self.alpha, scale_len=config.scale_len, backend=config.backend
        )

    @classmethod
    def kernels(cls, config: pb.HstuMixer, path: str, model: pb.Model, device: str) -> Iterator[AttentionUse]:
        """Yields `hstu_attention` with each mask of the layers."""
        deterministic = config.deterministic if config.HasField("deterministic") else None
        for mask in dict.fromkeys(rule.mask for rule in layer_rules(config)):
            facts = AttentionFacts(
                device=device,
                dtype=COMPUTE_DTYPES[model.precision],
                num_heads=config.num_heads,
                qk_dim=config.qk_dim,
                v_dim=config.v_dim,
                mask=mask,
                has_bias=config.HasField("bias"),
                needs_grad=True,
                deterministic=is_deterministic(deterministic),
            )
            yield AttentionUse(HSTU_ATTENTION, path, config.backend, facts)

    def forward(self, sequence: JaggedSequence) -> JaggedSequence:
        """Mixes tokens [T, E]; a truncation drops history tokens, never contextual tokens or targets."""
        input_dtype = sequence.values.dtype
        sequence = to_compute_dtype(sequence.with_values(self.input_dropout(sequence.values)))
        sequence = self.rules[0].truncate(sequence)
        for number in range(len(self.layers)):
            sequence = self._layer(number, sequence)
        return sequence.with_values(self.output_dropout(sequence.values.to(input_dtype)))

    def _layer(self, number: int, sequence: JaggedSequence) -> JaggedSequence:
        """Runs a layer and the truncation after it."""
        layer, mask, layout = self.layers[number], self.rules[number].mask, sequence.layout
        bias = self.biases[number](sequence) if self.biases else None
        behind = self.rules[number + 1] if number + 1 < len(self.rules) else LayerRule(mask)
        if behind.tail_len is None:
            attend_all = self._attend(layout, mask, bias)
            return sequence.with_values(layer(sequence.values, attend_all, self.depths[number](layout)))
        selection = layout.truncate(behind.tail_len)
        kept = selection.layout
        if not _leaves_few(kept, layout) or not layer.can_skip_rows():
            values = layer(sequence.values, self._attend(layout, mask, bias), self.depths[number](layout))
            return sequence.with_values(values).take(selection)
        attend_some = self._attend(layout, mask, bias, behind.tail_len)
        scale = self.depths[number](kept)
        values = layer.forward_rows(sequence.values, selection.index, attend_some, scale)
        return sequence.take(selection, values)

    def _attend(
        self, layout: SequenceLayout, mask: AttentionMask, bias: RelativeBias | None, tail: int | None = None
    ) -> Callable[..., Tensor]:
        """Returns the attention of one layer as a function of q, k and v; see `Problem` for `tail`."""
        problem = Problem(
            layout,
            mask,
            self.alpha,
            self.scale_len,
            bias,
            deterministic=is_deterministic(self.deterministic),
            tail=tail,
        )
        return partial(attend, problem=problem, backend=self.backend)

    @property
    def target_group_size(self) -> int:
        """The number of consecutive targets that can only be scored together, for the groups of any layer."""
        return math.lcm(*(rule.mask.target_group_size for rule in self.rules))

    def encode(
        self, sequence: JaggedSequence, cache: MixerCache | None = None, *, mixes: bool = False
    ) -> Encoded:
        """Computes the keys and values of contextual and history tokens; see `cached_stack`."""
        stages = None if cache is None else cache.stacks[0]
        encoded = cached_stack.encode([self], sequence, stages, mixes)
        return Encoded(MixerCache((encoded.stages,)), encoded.sequence)

    def score(self, sequence: JaggedSequence, cache: MixerCache) -> JaggedSequence:
        """Mixes targets [N, E] as `forward` mixes them after the tokens of the cache."""
        return cached_stack.score([self], sequence, *cache.stacks)

    def require_extendable(self, num_contextual: int, *, mixes: bool = False) -> None:
        """Checks that new events leave cached keys and values unchanged; see `cached_stack`."""
        cached_stack.require_extendable(self, num_contextual, mixes=mixes)

    def cache_stages(self) -> list[StageSpec]:
        """Describes the stages of the mixer's caches."""
        return cached_stack.stage_specs(0, [0], self)

    def flops(self, layout: SequenceLayout) -> int:
        """Counts the FLOP of a forward pass over these tokens; see `recsys.modules.flops`."""
        return stack_flops(self.layers, self.rules, layout, self.embedding_dim, self.attention_width)


def _leaves_few(kept: SequenceLayout, layout: SequenceLayout) -> bool:
    """Returns whether a truncation drops so many tokens that the layer before it should skip them."""
    if torch.compiler.is_compiling():  # the compiler does not know the numbers of tokens
        return False
    return kept.total_len <= MOST_KEPT * layout.total_len


def may_mix_as_one(config: pb.HstuMixer) -> bool:
    """Returns whether stacks with this message can share one attention per layer.

    Bias tables and recomputed projections rule it out, since each belongs to a single layer.
    """
    return not config.HasField("bias") and pb.UVQK not in config.recompute


def mix_as_one(mixers: Sequence[HstuMixer], sequences: Sequence[JaggedSequence]) -> list[JaggedSequence]:
    """Runs each mixer on its own sequence, with one attention per layer for all of them.

    Args:
        mixers: mixers of equal messages, each with its own weights.
        sequences: the sequence of each mixer.
    """
    if len(mixers) == 1:
        return [mixers[0](sequences[0])]
    input_dtype = sequences[0].values.dtype
    pairs = list(zip(mixers, sequences, strict=True))
    dropped = [sequence.with_values(mixer.input_dropout(sequence.values)) for mixer, sequence in pairs]
    joined = to_compute_dtype(join(dropped))
    for number, rule in enumerate(mixers[0].rules):
        joined = rule.truncate(joined)
        parts = joined.split()
        layers = [mixer.layers[number] for mixer in mixers]
        projections = project(layers, parts)
        q, k, v = projections.q, projections.k, projections.v
        attended = mixers[0].attention(q, k, v, layout=joined.layout, mask=rule.mask)
        scales = [mixer.depths[number](part.layout) for mixer, part in zip(mixers, parts, strict=True)]
        joined = joined.with_values(finish(layers, parts, projections, attended, scales))
    outputs = zip(mixers, joined.with_values(joined.values.to(input_dtype)).split(), strict=True)
    return [output.with_values(mixer.output_dropout(output.values)) for mixer, output in outputs]


def _layer(config: pb.HstuMixer, embedding_dim: int) -> STULayer:
    return STULayer(
        embedding_dim,
        num_heads=config.num_heads,
        qk_dim=config.qk_dim,
        v_dim=config.v_dim,
        config=STUConfig(_ACTIVATION[config.activation], _NORM[config.norm], _GATE[config.gate]),
        dropout=config.dropout,
        recompute=[_RECOMPUTE[choice] for choice in config.recompute],
        compiled=config.compile,
    )
