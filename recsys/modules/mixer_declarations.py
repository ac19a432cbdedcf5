"""Declares what configs must know about mixers, so that they can be resolved and checked without torch.

The mixers themselves are in `modules/mixers`. A mixer of another package can declare itself in the module of
its class; checking a config with it then imports torch.
"""

from collections.abc import Iterator, Sequence

from recsys import protos as pb
from recsys.config.checks.values import BELOW_ONE, COUNT, NOT_NEGATIVE, POSITIVE, Range, limit
from recsys.config.checks.walk import Finding
from recsys.config.declarations import Choice, MixerDeclaration, declared_mixer
from recsys.config.registry import declare
from recsys.config.textproto import did_you_mean

BACKENDS = ("auto", "sm90", "triton", "reference")
"""Attention backends that a config of `HstuMixer` may name."""

LINEAR_BACKENDS = ("auto", "triton", "reference")
"""Attention backends that a config of `LinearMixer` may name."""

PERIOD = Range(lambda x: x >= 2, "2 or more")
"""Wavelengths that whole numbers of tokens or seconds can tell from no wave at all."""

limit(
    pb.HstuMixer,
    {
        "num_layers": COUNT,
        "num_heads": COUNT,
        "qk_dim": COUNT,
        "v_dim": COUNT,
        "dropout": BELOW_ONE,
        "input_dropout": BELOW_ONE,
        "output_dropout": BELOW_ONE,
        "stochastic_depth": BELOW_ONE,
        "scale_len": POSITIVE,
        "alpha": POSITIVE,
    },
    required=("qk_dim",),
)
limit(
    pb.SasRecMixer,
    {"num_layers": COUNT, "num_heads": COUNT, "feed_forward_dim": COUNT, "dropout": BELOW_ONE},
)
limit(
    pb.RotaryPositions,
    dict.fromkeys(("shortest_tokens", "longest_tokens", "shortest_seconds"), PERIOD)
    | {"longest_seconds": NOT_NEGATIVE},
)
limit(
    pb.LinearMixer,
    {
        "num_layers": COUNT,
        "num_heads": COUNT,
        "qk_dim": COUNT,
        "v_dim": COUNT,
        "feed_forward_dim": NOT_NEGATIVE,
        "dropout": BELOW_ONE,
    },
    required=("qk_dim",),
)
limit(pb.HybridMixer, required=("mixers",))
limit(pb.MixtureMixer, required=("stacks",))
limit(pb.ChannelStack, required=("channel", "hstu"))


@declare(pb.HstuMixer)
class HstuDeclaration(MixerDeclaration):
    """Declares `HstuMixer`."""

    keeps_cache = True

    @property
    def reads_times(self) -> bool:
        """Whether the mixer has a bias with time buckets."""
        return self.config.HasField("bias") and self.config.bias.num_time_buckets > 0

    def choices(self) -> Iterator[Choice]:
        """Derives the width of values, the divisor of attention weights and the size of the bias tables."""
        config, path, model = self.config, self.path, self.model
        if config.HasField("qk_dim"):
            yield Choice(config, path, "v_dim", config.qk_dim, f"{path}.qk_dim")
        if model.HasField("max_seq_len"):
            length, origin = model.max_seq_len, "model.max_seq_len"
            yield Choice(config, path, "scale_len", float(length), origin)
            if config.HasField("bias"):
                yield Choice(config.bias, f"{path}.bias", "num_positions", length, origin)

    def findings(self) -> Iterator[Finding]:
        """Checks the backend, and that compiled layers do not recompute."""
        config = self.config
        yield from _unknown_backend(self, BACKENDS)
        if config.compile:
            again = [pb.Recompute.Name(part) for part in config.recompute if part in (pb.NORMED_X, pb.UVQK)]
            if again:
                problem = (
                    f"compiled layers cannot recompute NORMED_X or UVQK: leave {' and '.join(again)} out"
                )
                yield Finding(f"{self.path}.compile", f"{problem} of recompute, or set compile to false")


@declare(pb.SasRecMixer)
class SasRecDeclaration(MixerDeclaration):
    """Declares `SasRecMixer`."""

    keeps_cache = True

    @property
    def reads_times(self) -> bool:
        """Whether queries and keys are turned by times."""
        return self.config.HasField("rotary") and self.config.rotary.longest_seconds > 0

    def choices(self) -> Iterator[Choice]:
        """Derives the width of the feed-forward layers."""
        width = self.model.embedding_dim
        yield Choice(self.config, self.path, "feed_forward_dim", width, "model.embedding_dim")

    def findings(self) -> Iterator[Finding]:
        """Checks that the number of heads divides the width of a token, and what rotary positions need."""
        width, heads = self.model.embedding_dim, self.config.num_heads
        if heads > 0 and width % heads:
            problem = f"{heads} does not divide model.embedding_dim, which is {width}"
            yield Finding(f"{self.path}.num_heads", problem)
        elif heads > 0 and self.config.HasField("rotary") and width // heads % 2:
            problem = f"turns pairs of numbers, but heads are {width // heads} wide; take another num_heads"
            yield Finding(f"{self.path}.rotary", problem)


@declare(pb.LinearMixer)
class LinearDeclaration(MixerDeclaration):
    """Declares `LinearMixer`."""

    keeps_cache = True

    @property
    def reads_times(self) -> bool:
        """Whether the mixer has a time channel."""
        return self.config.time_channel

    def choices(self) -> Iterator[Choice]:
        """Derives the width of values and of the feed-forward layers."""
        config, path = self.config, self.path
        if config.HasField("qk_dim"):
            yield Choice(config, path, "v_dim", config.qk_dim, f"{path}.qk_dim")
        width = self.model.embedding_dim
        yield Choice(config, path, "feed_forward_dim", width, "model.embedding_dim")

    def findings(self) -> Iterator[Finding]:
        """Checks the backend."""
        yield from _unknown_backend(self, LINEAR_BACKENDS)


@declare(pb.HybridMixer)
class HybridDeclaration(MixerDeclaration):
    """Declares `HybridMixer`, whose mixers each declare themselves."""

    @property
    def keeps_cache(self) -> bool:
        """Whether all mixers can score with a cache."""
        return all(mixer.keeps_cache for mixer in self._mixers())

    @property
    def reads_times(self) -> bool:
        """Whether any of the mixers reads times."""
        return any(mixer.reads_times for mixer in self._mixers())

    def choices(self) -> Iterator[Choice]:
        """Yields the choices of each mixer."""
        for mixer in self._mixers():
            yield from mixer.choices()

    def findings(self) -> Iterator[Finding]:
        """Yields the findings of each mixer, none of which may be a mixture."""
        for mixer in self._mixers():
            if isinstance(mixer.config, pb.MixtureMixer):
                problem = "a mixture takes several sequences and returns only targets; use it alone"
                yield Finding(mixer.path, problem)
            else:
                yield from mixer.findings()

    def _mixers(self) -> list[MixerDeclaration]:
        chosen = [
            declared_mixer(mixer, f"{self.path}.mixers[{index}]", self.model)
            for index, mixer in enumerate(self.config.mixers)
        ]
        return [mixer for mixer in chosen if mixer is not None]


@declare(pb.MixtureMixer)
class MixtureDeclaration(MixerDeclaration):
    """Declares `MixtureMixer`, whose stacks each declare themselves."""

    keeps_cache = True

    @property
    def reads_times(self) -> bool:
        """Whether any of the stacks reads times."""
        return any(stack.reads_times for stack in self._stacks())

    def choices(self) -> Iterator[Choice]:
        """Yields the choices of each stack."""
        for stack in self._stacks():
            yield from stack.choices()

    def findings(self) -> Iterator[Finding]:
        """Yields the findings of each stack. The model's declaration compares stacks with channels."""
        for stack in self._stacks():
            yield from stack.findings()

    def _stacks(self) -> list[HstuDeclaration]:
        return [
            HstuDeclaration(stack.hstu, f"{self.path}.stacks[{index}].hstu", self.model)
            for index, stack in enumerate(self.config.stacks)
        ]


def _unknown_backend(mixer: MixerDeclaration, backends: Sequence[str]) -> Iterator[Finding]:
    """Yields a finding if the mixer's op does not have the backend that the config names."""
    name = mixer.config.backend
    if name not in backends:
        problem = f"no backend is called {name!r}. {did_you_mean(name, backends)}"
        yield Finding(f"{mixer.path}.backend", problem)
