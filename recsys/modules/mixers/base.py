"""`Mixer`: the interface of mixers to models, commands and packages, with defaults for a plain mixer."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from recsys import protos as pb
from recsys.modules.mixers.rules import LayerRule
from recsys.ops.attention_args import AttentionFacts
from recsys.ops.runtime.dispatch import Op


class AttentionUse(NamedTuple):
    """An attention op that some layers of a mixer will call.

    Attributes:
        op: the op.
        path: path of the mixer's message in the config.
        backend: the backend that the config asks for.
        facts: facts by which the op chooses a backend.
    """

    op: Op
    path: str
    backend: str
    facts: AttentionFacts


class Mixer(nn.Module):
    """A stack of layers in which the tokens of a sample see each other.

    A mixer is registered under its message and built with `(config, *, embedding_dim)`. It maps a
    `JaggedSequence` to one with mixed values, and `flops(layout)` counts the cost. A mixer that can score
    with a cache also has the methods of `modules.cache.CachingMixer`, and its declaration says so.

    Attributes:
        rules: mask and truncation of each layer; None if the mixer does not declare them.
    """

    rules: Sequence[LayerRule] | None = None

    @classmethod
    def kernels(cls, config: Any, path: str, model: pb.Model, device: str) -> Iterator[AttentionUse]:
        """Yields every attention op that the mixer of a resolved config will call, before the mixer is built.

        Args:
            config: the mixer's message.
            path: path of this message in the config.
            model: the model's message.
            device: `cpu` or `cuda`.
        """
        return iter(())

    def channel_stacks(self) -> Sequence[nn.Module]:
        """Returns the stack of layers of each channel of the history; [self] if there are no channels."""
        return [self]
