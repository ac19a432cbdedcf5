"""`LinearMixer`: a stack of linear-attention layers, whose cost is linear in the length of a history."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from recsys import protos as pb
from recsys.config.registry import register
from recsys.modules.cache import (
    CachingMixer,
    Encoded,
    MixerCache,
    NotExtendableError,
    StageSpec,
    require_evaluation,
    require_events,
    require_prefix,
)
from recsys.modules.distance_channels import (
    POSITION_PERIODS,
    TIME_PERIODS,
    Clock,
    Past,
    position_clock,
    time_clock,
)
from recsys.modules.linear_layer import LinearConfig, LinearLayer
from recsys.modules.mixers.base import AttentionUse, Mixer
from recsys.modules.mixers.batched_layers import to_compute_dtype
from recsys.modules.precision import COMPUTE_DTYPES
from recsys.modules.recurrent_cache import StateStage
from recsys.modules.sequence import JaggedSequence
from recsys.ops import SequenceLayout
from recsys.ops.linear_attention import OP as LINEAR_ATTENTION
from recsys.ops.linear_attention import LinearAttentionFacts

_FORM = {pb.LinearMixer.RETENTION: "retention", pb.LinearMixer.GATED: "gated", pb.LinearMixer.DELTA: "delta"}


@register(pb.LinearMixer)
class LinearMixer(Mixer, CachingMixer):
    """Stacks layers of equal config, each with its own channels; all layers read the same clocks.

    Args:
        config: the resolved message (with `v_dim` and `feed_forward_dim`).
        embedding_dim: E.
    """

    def __init__(self, config: pb.LinearMixer, *, embedding_dim: int):
        super().__init__()
        channels = _channels(config)
        settings = LinearConfig(
            config.num_heads,
            config.qk_dim,
            config.v_dim,
            _FORM[config.form],
            config.feed_forward_dim,
            config.dropout,
            config.backend,
        )
        self.layers = nn.ModuleList(
            LinearLayer(embedding_dim, settings, channels) for _ in range(config.num_layers)
        )
        for name, periods in channels.items():
            self.register_buffer(f"{name}_periods", torch.tensor(periods), persistent=False)

    @classmethod
    def kernels(
        cls, config: pb.LinearMixer, path: str, model: pb.Model, device: str
    ) -> Iterator[AttentionUse]:
        """Yields `linear_attention` for the content of tokens and for the channels of time and position."""
        dtype = COMPUTE_DTYPES[model.precision]
        channels = list(_channels(config).values())
        for width in dict.fromkeys([config.qk_dim, *(2 * len(periods) for periods in channels)]):
            facts = LinearAttentionFacts(device, dtype, width, config.v_dim)
            yield AttentionUse(LINEAR_ATTENTION, path, config.backend, facts)

    def forward(self, sequence: JaggedSequence) -> JaggedSequence:
        """Mixes tokens [T, E]."""
        input_dtype = sequence.values.dtype
        sequence = to_compute_dtype(sequence)
        clocks, values = self._clocks(sequence), sequence.values
        for layer in self.layers:
            values = layer(values, sequence.layout, clocks)
        return sequence.with_values(values.to(input_dtype))

    def encode(
        self, sequence: JaggedSequence, cache: MixerCache | None = None, *, mixes: bool = False
    ) -> Encoded:
        """Computes the states of all layers after contextual and history tokens.

        Raises:
            NotExtendableError: a time channel would change the state of old tokens.
            ValueError: there are targets or, if there is a cache, tokens other than history.
            RuntimeError: the mixer is in training mode.
        """
        require_evaluation(self)
        past, states = self._past(cache)
        if past is None:
            require_prefix(sequence.layout)
        else:
            require_events(sequence.layout)
            self.require_extendable(past.num_contextual, mixes=mixes)
        given, sequence = sequence, to_compute_dtype(sequence)
        clocks, values, after = self._clocks(sequence, past), sequence.values, []
        for layer, before in zip(self.layers, states, strict=True):
            values, ends = layer.proceed(values, sequence.layout, clocks, before)
            after += ends
        stage = StateStage(self._grown(past, sequence), tuple(after))
        mixed = given.with_values(values.to(given.values.dtype)) if mixes else None
        return Encoded(MixerCache(((stage,),)), mixed)

    def score(self, sequence: JaggedSequence, cache: MixerCache) -> JaggedSequence:
        """Mixes targets [N, E] as `forward` mixes them after the tokens of the cache.

        Raises:
            ValueError: the number of samples differs from that of the cache.
            RuntimeError: the mixer is in training mode.
        """
        require_evaluation(self)
        past, states = self._past(cache)
        input_dtype, sequence = sequence.values.dtype, to_compute_dtype(sequence)
        clocks, values = self._clocks(sequence, past), sequence.values
        for layer, before in zip(self.layers, states, strict=True):
            values = layer.proceed(values, sequence.layout, clocks, before).values
        return sequence.with_values(values.to(input_dtype))

    def require_extendable(self, num_contextual: int, *, mixes: bool = False) -> None:
        """Checks that new events leave the input of every layer but the first unchanged for old tokens.

        Raises:
            NotExtendableError: a token reads the time of the next token.
        """
        if self.reads_times and (mixes or len(self.layers) > 1):
            raise NotExtendableError(
                "a cache cannot be extended with linear.time_channel: a token reads the time of the token "
                "after it, which has changed; call prefill with the whole history, or set time_channel to "
                "false before training"
            )

    def cache_stages(self) -> list[StageSpec]:
        """Describes the states of all layers as one stage."""
        shapes = [shape for layer in self.layers for shape in layer.state_shapes]
        return [StageSpec("stack_0_stage_0", 0, [0], len(self.layers), self.reads_times, states=shapes)]

    @property
    def reads_times(self) -> bool:
        """Whether there is a time channel."""
        return hasattr(self, "time_periods")

    def flops(self, layout: SequenceLayout) -> int:
        """Counts the FLOP of a forward pass over these tokens; see `recsys.modules.flops`."""
        return sum(layer.flops(layout.total_len) for layer in self.layers)

    def _clocks(self, sequence: JaggedSequence, past: Past | None = None) -> dict[str, Clock]:
        readers = {"time": time_clock, "position": position_clock}
        periods: dict[str, Tensor] = dict(self.named_buffers(recurse=False))
        return {
            name: read(sequence, periods[f"{name}_periods"], past)
            for name, read in readers.items()
            if f"{name}_periods" in periods
        }

    def _past(self, cache: MixerCache | None) -> tuple[Past | None, list[Sequence[Tensor] | None]]:
        """Returns the past and, for each layer, its states."""
        if cache is None:
            return None, [None] * len(self.layers)
        ((stage,),) = cache.stacks
        each = len(stage.states) // len(self.layers)
        starts = range(0, len(stage.states), each)
        return stage.past, [stage.states[start : start + each] for start in starts]

    def _grown(self, past: Past | None, sequence: JaggedSequence) -> Past:
        """Returns the past of tokens that follow those of the sequence."""
        layout, newest = sequence.layout, None
        if self.reads_times:
            rows = (layout.offsets[1:] - 1).clamp(min=0)
            padded = torch.cat([sequence.timestamps, sequence.timestamps.new_zeros(1)])
            newest = padded.index_select(0, rows)
        if past is None:
            return Past(layout.lengths, layout.num_contextual, newest)
        if newest is not None:
            newest = torch.where(layout.lengths > 0, newest, past.newest)
        return Past(past.lengths + layout.lengths, past.num_contextual, newest)


def _channels(config: pb.LinearMixer) -> dict[str, tuple[int, ...]]:
    """Returns the clock periods of each channel, by name."""
    channels = {}
    if config.time_channel:
        channels["time"] = TIME_PERIODS
    if config.position_channel:
        channels["position"] = POSITION_PERIODS
    return channels
