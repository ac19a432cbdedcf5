"""`ParallelCodes`: predicts all codes of the next item at once, each by a head of its own.

After Hou et al., "Generating Long Semantic IDs in Parallel for Recommendation" (KDD 2025, arXiv 2506.05781):
a head maps the state by a residual layer and compares it with the embeddings of all values of its code by
their cosine. Codes are independent given the state, so the log-probability of an item is the sum of those of
its codes, and all items are scored by looking these up.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recsys import protos as pb
from recsys.modules.code_decoder import CodeEmbedding

SHORTEST = 1e-8
"""Vectors shorter than this count as having this length."""


class ParallelCodes(nn.Module):
    """Gives the log-probabilities of all values of all codes, given the state of a history.

    Args:
        config: the message.
        sizes: number of values of each code.
        embed: embeddings of codes, which the tokens of the history use too.
        width: E.
    """

    def __init__(self, config: pb.ParallelCodes, sizes: tuple[int, ...], embed: CodeEmbedding, width: int):
        super().__init__()
        self.embed = embed
        self.sizes = sizes
        self.temperature = config.temperature
        # A residual layer of zeros: every head begins with the state itself.
        self.weight = nn.Parameter(torch.zeros(len(sizes), width, width))
        self.bias = nn.Parameter(torch.zeros(len(sizes), 1, width))

    def forward(self, states: Tensor, codes: Tensor) -> Tensor:
        """Returns the mean over codes of the cross-entropy, float32 [n].

        Args:
            states: [n, E].
            codes: int64 [n, codes] of the items to predict.
        """
        losses = [
            F.cross_entropy(logits, target, reduction="none")
            for logits, target in zip(self.logits(states), codes.unbind(1), strict=True)
        ]
        return torch.stack(losses).mean(0)

    def scores(self, states: Tensor, codes: Tensor) -> Tensor:
        """Returns log P(item) of every item, float32 [B, items].

        Args:
            states: [B, E].
            codes: int64 [items, codes].
        """
        total = states.new_zeros(states.shape[0], codes.shape[0], dtype=torch.float32)
        for logits, values in zip(self.logits(states), codes.unbind(1), strict=True):
            total = total + logits.log_softmax(1).index_select(1, values)
        return total

    def logits(self, states: Tensor) -> list[Tensor]:
        """Returns for each code the cosines with its values over the temperature, float32 [n, V]."""
        heads = states + F.silu(
            torch.baddbmm(self.bias.to(states.dtype), states.expand(len(self.sizes), -1, -1), self.weight)
        )
        starts = self.embed.starts
        # A cosine in bfloat16, divided by a small temperature, would be too coarse.
        with torch.autocast(states.device.type, enabled=False):
            heads = F.normalize(heads.float(), dim=2, eps=SHORTEST)
            values = F.normalize(self.embed.table.weight.float(), dim=1, eps=SHORTEST)
            return [
                head @ values[start : start + size].T / self.temperature
                for head, start, size in zip(heads, starts, self.sizes, strict=False)
            ]

    def flops(self, paths: int) -> int:
        """Counts the FLOP of the losses for `paths` states; see `recsys.modules.flops`."""
        return 2 * paths * (self.weight.numel() + sum(self.sizes) * self.weight.shape[1])
