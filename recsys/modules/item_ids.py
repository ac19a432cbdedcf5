"""`ItemIds`: embeddings of items beside those of their codes, and a softmax over all items."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recsys import protos as pb
from recsys.modules.precision import product_dtype
from recsys.ops import linear_logp
from recsys.ops.linear_logp.recompute import SHORTEST

IGNORED = -1


class ItemIds(nn.Module):
    """Predicts the next item by the cosines of a state with the tokens of all items.

    Args:
        config: the message.
        items: V, number of items.
        width: E.
        init_std: standard deviation of the embeddings at the start.
    """

    def __init__(self, config: pb.ItemIds, items: int, width: int, init_std: float):
        super().__init__()
        self.temperature = config.temperature
        # Row 0 stands for unknown items.
        self.table = nn.Embedding(items + 1, width)
        nn.init.normal_(self.table.weight, std=init_std)

    def forward(self, states: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:
        """Returns the cross-entropy of each target among all items, float32 [n]; 0 for an unknown item.

        Args:
            states: [n, E].
            tokens: [V, E], the tokens of all known items.
            targets: int64 [n], rows of the item table.
        """
        dtype = product_dtype(states)
        return -linear_logp(
            states.to(dtype),
            tokens.to(dtype),
            torch.where(targets > 0, targets - 1, IGNORED),
            temperature=self.temperature,
            ignore_index=IGNORED,
            l2_normalize=True,
        ).logp

    def scores(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Returns log P(item) of every item, float32 [n, V]; see `forward`."""
        with torch.autocast(states.device.type, enabled=False):
            states, tokens = (F.normalize(rows.float(), dim=1, eps=SHORTEST) for rows in (states, tokens))
            return (states @ tokens.T / self.temperature).log_softmax(1)

    def flops(self, paths: int) -> int:
        """Counts the FLOP of the losses for `paths` states; see `recsys.modules.flops`."""
        return 2 * paths * (self.table.weight.shape[0] - 1) * self.table.weight.shape[1]
