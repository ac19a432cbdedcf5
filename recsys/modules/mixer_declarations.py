"""Declarations of the mixers about their messages, for configs that are resolved and checked without torch.

The classes themselves are in `modules/mixers`. A mixer from another package can declare itself in the module
of its class, at the price that checking a config with it imports torch.
"""

from collections.abc import Iterator

from recsys import protos as pb
from recsys.config.checks.values import BELOW_ONE, COUNT, POSITIVE, limit
from recsys.config.checks.walk import Finding
from recsys.config.declarations import Choice, MixerDeclaration
from recsys.config.registry import declare
from recsys.config.textproto import did_you_mean

BACKENDS = ("auto", "sm90", "triton", "reference")
"""Attention backends that an `HstuMixer` may name."""

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
limit(pb.MixtureMixer, required=("stacks",))
limit(pb.ChannelStack, required=("channel", "hstu"))


@declare(pb.HstuMixer)
class HstuDeclaration(MixerDeclaration):
    """Declares `HstuMixer`."""

    keeps_cache = True

    @property
    def reads_times(self) -> bool:
        """In a bias with time buckets."""
        return self.config.HasField("bias") and self.config.bias.num_time_buckets > 0

    def choices(self) -> Iterator[Choice]:
        """The width of values, the divisor of attention weights and the positions of the bias tables."""
        config, path, model = self.config, self.path, self.model
        if config.HasField("qk_dim"):
            yield Choice(config, path, "v_dim", config.qk_dim, f"{path}.qk_dim")
        if model.HasField("max_seq_len"):
            length, origin = model.max_seq_len, "model.max_seq_len"
            yield Choice(config, path, "scale_len", float(length), origin)
            if config.HasField("bias"):
                yield Choice(config.bias, f"{path}.bias", "num_positions", length, origin)

    def findings(self) -> Iterator[Finding]:
        """Rules of the backend and of compiled layers."""
        config = self.config
        if config.backend not in BACKENDS:
            what = f"no backend is called {config.backend!r}. {did_you_mean(config.backend, BACKENDS)}"
            yield Finding(f"{self.path}.backend", what)
        if config.compile:
            again = [pb.Recompute.Name(part) for part in config.recompute if part in (pb.NORMED_X, pb.UVQK)]
            if again:
                what = f"what is compiled is not computed again: leave {' and '.join(again)} out of recompute"
                yield Finding(f"{self.path}.compile", f"{what}, or do not compile")


@declare(pb.SasRecMixer)
class SasRecDeclaration(MixerDeclaration):
    """Declares `SasRecMixer`."""

    def choices(self) -> Iterator[Choice]:
        """The width of the feed-forward layers."""
        width = self.model.embedding_dim
        yield Choice(self.config, self.path, "feed_forward_dim", width, "model.embedding_dim")

    def findings(self) -> Iterator[Finding]:
        """Heads must divide the width of a token."""
        width, heads = self.model.embedding_dim, self.config.num_heads
        if heads > 0 and width % heads:
            what = f"{heads} does not divide model.embedding_dim, which is {width}"
            yield Finding(f"{self.path}.num_heads", what)


@declare(pb.MixtureMixer)
class MixtureDeclaration(MixerDeclaration):
    """Declares `MixtureMixer`, whose stacks each declare themselves."""

    keeps_cache = True

    def choices(self) -> Iterator[Choice]:
        """The choices of each stack."""
        for stack in self._stacks():
            yield from stack.choices()

    def findings(self) -> Iterator[Finding]:
        """The findings of each stack; the model around the mixture compares stacks with channels."""
        for stack in self._stacks():
            yield from stack.findings()

    def _stacks(self) -> list[HstuDeclaration]:
        return [
            HstuDeclaration(stack.hstu, f"{self.path}.stacks[{index}].hstu", self.model)
            for index, stack in enumerate(self.config.stacks)
        ]
