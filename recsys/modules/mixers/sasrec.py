"""`SasRecMixer`: a causal transformer with softmax attention (SASRec, arXiv 1808.09781)."""

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn import functional as F

from recsys import protos as pb
from recsys.config.registry import register
from recsys.modules.linear_layer import FeedForward
from recsys.modules.mixers.base import AttentionUse, Mixer
from recsys.modules.mixers.rules import layer_rules, stack_flops
from recsys.modules.norm import LayerNorm
from recsys.modules.precision import COMPUTE_DTYPES
from recsys.modules.sequence import JaggedSequence
from recsys.ops import AttentionMask, SequenceLayout, softmax_attention
from recsys.ops.attention_args import AttentionFacts, is_deterministic
from recsys.ops.softmax_attention import OP as SOFTMAX_ATTENTION


@register(pb.SasRecMixer)
class SasRecMixer(Mixer):
    """Stacks pre-norm transformer blocks or LiGR blocks, followed by a LayerNorm.

    Args:
        config: the resolved message (with `feed_forward_dim`, lengths in tokens).
        embedding_dim: E; `num_heads` divides it.

    Raises:
        ValueError: `num_heads` does not divide E, or layer groups are invalid; see `layer_rules`.
    """

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
        for block, rule in zip(self.blocks, self.rules, strict=True):
            sequence = rule.truncate(sequence)
            sequence = sequence.with_values(block(sequence.values, sequence.layout, rule.mask))
        return sequence.with_values(self.norm(sequence.values))

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

    def attend(self, x: Tensor, layout: SequenceLayout, mask: AttentionMask) -> Tensor:
        """Returns dropout(project(attention(norm(x)))), [T, E]."""
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(1, (3, self.num_heads, -1)).unbind(1)
        return self.dropout(self.project(softmax_attention(q, k, v, layout, mask).flatten(1)))


class TransformerBlock(_AttentionBlock):
    """Computes x + dropout(project(attention(norm(x)))), then x + dropout(W2 relu(W1 norm(x)))."""

    def __init__(self, embedding_dim: int, *, num_heads: int, feed_forward_dim: int, dropout: float = 0.0):
        super().__init__(embedding_dim, num_heads=num_heads, dropout=dropout)
        self.feed_forward_norm = LayerNorm(embedding_dim)
        self.widen = nn.Linear(embedding_dim, feed_forward_dim)
        self.narrow = nn.Linear(feed_forward_dim, embedding_dim)
        _initialize(self.qkv, self.project, self.widen, self.narrow)

    def forward(self, x: Tensor, layout: SequenceLayout, mask: AttentionMask) -> Tensor:
        """Maps [T, E] to [T, E]."""
        x = x + self.attend(x, layout, mask)
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

    def forward(self, x: Tensor, layout: SequenceLayout, mask: AttentionMask) -> Tensor:
        """Maps [T, E] to [T, E]."""
        x = x + self.attention_gate(x).sigmoid() * self.attend(x, layout, mask)
        return x + self.feed_forward_gate(x).sigmoid() * self.dropout(self.feed_forward(x))


def _initialize(*linears: nn.Linear) -> None:
    for linear in linears:
        nn.init.xavier_uniform_(linear.weight)
        nn.init.zeros_(linear.bias)
