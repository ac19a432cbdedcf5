"""`SasRecMixer`: a causal transformer with softmax attention (SASRec, arXiv 1808.09781)."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from recsys import protos as pb
from recsys.config.registry import register
from recsys.modules.cache import CachingMixer, Encoded, MixerCache, StageSpec
from recsys.modules.linear_layer import FeedForward
from recsys.modules.mixers import cached_stack
from recsys.modules.mixers.base import AttentionUse, Mixer
from recsys.modules.mixers.batched_layers import Projections
from recsys.modules.mixers.rotary import RotaryPositions, Rotations
from recsys.modules.mixers.rules import layer_rules, stack_flops
from recsys.modules.norm import LayerNorm
from recsys.modules.precision import COMPUTE_DTYPES
from recsys.modules.sequence import JaggedSequence
from recsys.modules.stu_paths import KeysValues, Projected
from recsys.ops import AttentionMask, SequenceLayout, softmax_attention, softmax_attention_cached
from recsys.ops.attention_args import AttentionFacts, is_deterministic
from recsys.ops.softmax_attention import OP as SOFTMAX_ATTENTION


@register(pb.SasRecMixer)
class SasRecMixer(Mixer, CachingMixer):
    """Stacks pre-norm transformer blocks or LiGR blocks, followed by a LayerNorm.

    Args:
        config: the resolved message (with `feed_forward_dim`, lengths in tokens).
        embedding_dim: E; `num_heads` divides it.

    Raises:
        ValueError: `num_heads` does not divide E, or layer groups are invalid; see `layer_rules`.
    """

    casts_residual = False

    def __init__(self, config: pb.SasRecMixer, *, embedding_dim: int):
        super().__init__()
        if embedding_dim % config.num_heads:
            raise ValueError(
                f"sasrec.num_heads = {config.num_heads} must divide model.embedding_dim = {embedding_dim}"
            )
        self.rules = layer_rules(config)
        self.embedding_dim = embedding_dim
        self.attention_width = 2 * embedding_dim
        block = LigrBlock if config.ligr else TransformerBlock
        self.blocks = nn.ModuleList(
            block(
                embedding_dim,
                num_heads=config.num_heads,
                feed_forward_dim=config.feed_forward_dim,
                dropout=config.dropout,
            )
            for _ in self.rules
        )
        self.norm = LayerNorm(embedding_dim)
        self.num_heads = config.num_heads
        self.qk_dim = self.v_dim = embedding_dim // config.num_heads
        self.biases: Sequence[nn.Module] = ()
        self.rotary = None
        if config.HasField("rotary"):
            self.rotary = RotaryPositions(config.rotary, width=self.qk_dim)
        self.reads_times = self.rotary is not None and self.rotary.timed
        self.attention, self.cached_attention = softmax_attention, softmax_attention_cached

    @classmethod
    def kernels(
        cls, config: pb.SasRecMixer, path: str, model: pb.Model, device: str
    ) -> Iterator[AttentionUse]:
        """Yields `softmax_attention` with each mask of the layers."""
        width = model.embedding_dim // config.num_heads
        for mask in dict.fromkeys(rule.mask for rule in layer_rules(config)):
            facts = AttentionFacts(
                device=device,
                dtype=COMPUTE_DTYPES[model.precision],
                num_heads=config.num_heads,
                qk_dim=width,
                v_dim=width,
                mask=mask,
                needs_grad=True,
                deterministic=is_deterministic(),
                histories_only=model.HasField("retriever"),
            )
            yield AttentionUse(SOFTMAX_ATTENTION, path, "auto", facts)

    def forward(self, sequence: JaggedSequence) -> JaggedSequence:
        """Mixes tokens [T, E]; a truncation drops history tokens, never contextual tokens or targets."""
        rotations = Rotations(self.rotary)
        for block, rule in zip(self.blocks, self.rules, strict=True):
            sequence = rule.truncate(sequence)
            turn = partial(rotations.apply, sequence=sequence, mask=rule.mask)
            sequence = sequence.with_values(block(sequence.values, sequence.layout, rule.mask, turn))
        return sequence.with_values(self.norm(sequence.values))

    @property
    def layers(self) -> list["_CachedBlock"]:
        """The blocks as `cached_stack` runs them."""
        return [_CachedBlock(block) for block in self.blocks]

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
        mixed = encoded.sequence and encoded.sequence.with_values(self.norm(encoded.sequence.values))
        return Encoded(MixerCache((encoded.stages,)), mixed)

    def score(self, sequence: JaggedSequence, cache: MixerCache) -> JaggedSequence:
        """Mixes targets [N, E] as `forward` mixes them after the tokens of the cache."""
        mixed = cached_stack.score([self], sequence, *cache.stacks)
        return mixed.with_values(self.norm(mixed.values))

    def require_extendable(self, num_contextual: int, *, mixes: bool = False) -> None:
        """Checks that new events leave cached keys and values unchanged; see `cached_stack`."""
        cached_stack.require_extendable(self, num_contextual, mixes=mixes)

    def cache_stages(self) -> list[StageSpec]:
        """Describes the stages of the mixer's caches."""
        return cached_stack.stage_specs(0, [0], self)

    def flops(self, layout: SequenceLayout) -> int:
        """Counts the FLOP of a forward pass over these tokens; see `recsys.modules.flops`."""
        return stack_flops(self.blocks, self.rules, layout, self.embedding_dim, self.attention_width)


class _AttentionBlock(nn.Module):
    """The part of a block that both kinds have: attention over normalized tokens."""

    def __init__(self, embedding_dim: int, *, num_heads: int, dropout: float):
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = LayerNorm(embedding_dim)
        self.qkv = nn.Linear(embedding_dim, 3 * embedding_dim)
        self.project = nn.Linear(embedding_dim, embedding_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        layout: SequenceLayout,
        mask: AttentionMask,
        turn: Callable[[Projections], Projections],
    ) -> Tensor:
        """Maps [T, E] to [T, E]; `turn` rotates queries and keys."""
        _, q, k, v = turn(Projections([], *self.queries_keys_values(x)))
        return self.finish(x, softmax_attention(q, k, v, layout, mask))

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, ...]:
        """Returns q, k and v, each [T, H, D]."""
        return self.qkv(self.attention_norm(x)).unflatten(1, (3, self.num_heads, -1)).unbind(1)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Computes the block's output [T, E] from its input and attention's output [T, H, D]."""
        raise NotImplementedError

    def mixed(self, attended: Tensor) -> Tensor:
        """Returns dropout(project(attended)), [T, E]."""
        return self.dropout(self.project(attended.flatten(1)))


class TransformerBlock(_AttentionBlock):
    """Computes x + dropout(project(attention(norm(x)))), then x + dropout(W2 relu(W1 norm(x)))."""

    def __init__(self, embedding_dim: int, *, num_heads: int, feed_forward_dim: int, dropout: float = 0.0):
        super().__init__(embedding_dim, num_heads=num_heads, dropout=dropout)
        self.feed_forward_norm = LayerNorm(embedding_dim)
        self.widen = nn.Linear(embedding_dim, feed_forward_dim)
        self.narrow = nn.Linear(feed_forward_dim, embedding_dim)
        _initialize(self.qkv, self.project, self.widen, self.narrow)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Computes the block's output [T, E] from its input and attention's output [T, H, D]."""
        x = x + self.mixed(attended)
        hidden = F.relu(self.widen(self.feed_forward_norm(x)))
        return x + self.dropout(self.narrow(hidden))


class LigrBlock(_AttentionBlock):
    """Computes x + sigmoid(A x) * attend(x), then x + sigmoid(B x) * dropout(FeedForward(x)).

    A and B are linear layers with bias. Source: LiGR, arXiv 2502.03417, as eSASRec has it, arXiv 2508.06450.
    """

    def __init__(self, embedding_dim: int, *, num_heads: int, feed_forward_dim: int, dropout: float = 0.0):
        super().__init__(embedding_dim, num_heads=num_heads, dropout=dropout)
        self.attention_gate = nn.Linear(embedding_dim, embedding_dim)
        self.feed_forward = FeedForward(embedding_dim, feed_forward_dim, dropout)
        self.feed_forward_gate = nn.Linear(embedding_dim, embedding_dim)
        _initialize(self.qkv, self.project, self.attention_gate, self.feed_forward_gate)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Computes the block's output [T, E] from its input and attention's output [T, H, D]."""
        x = x + self.attention_gate(x).sigmoid() * self.mixed(attended)
        return x + self.feed_forward_gate(x).sigmoid() * self.dropout(self.feed_forward(x))


class _CachedBlock(NamedTuple):
    """A block as `cached_stack` runs a layer, in two halves around attention."""

    block: _AttentionBlock

    def project(self, x: Tensor) -> Projected:
        """Computes queries, keys and values; `finish` computes gates from x, so there is no u."""
        q, k, v = self.block.queries_keys_values(x)
        return Projected(x, q, k, v, x, None)

    def keys_and_values(self, x: Tensor) -> KeysValues:
        """Computes keys and values."""
        return KeysValues(*self.block.queries_keys_values(x)[1:])

    def finish(self, x: Tensor, u: Tensor, attended: Tensor, scale: Tensor | None = None) -> Tensor:
        """Computes the block's output."""
        return self.block.finish(x, attended)


def _initialize(*linears: nn.Linear) -> None:
    for linear in linears:
        nn.init.xavier_uniform_(linear.weight)
        nn.init.zeros_(linear.bias)
