"""`ContextualizedMLP`: layers, the last of which has weights computed from the user features of each row.

The content and action encoders pass it their inputs with a `RowContext`. It follows the parameterized content
embedding of HSTU rankers. Here the generated weights are a deviation from shared weights, and a rank bounds
their number.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recsys import protos as pb
from recsys.modules.flops import linear_flops
from recsys.modules.norm import LayerNorm
from recsys.ops import SequenceLayout, gather_rows

DEVIATION = 0.1
"""Initial size of a row's deviation from the shared weights, relative to the shared weights."""


@dataclass(frozen=True, eq=False)
class RowContext:
    """The rows that n items or events belong to.

    Attributes:
        features: [B, C], the concatenated USER features of each row.
        layout: how the items are distributed over rows: B samples, n tokens.
    """

    features: Tensor
    layout: SequenceLayout


class ContextualizedMLP(nn.Module):
    """Computes y = W_b z + a_b for each item of row b, where z is the output of the shared layers for x.

    [W_b, a_b] = G silu(LayerNorm(A c_b)), with c_b [C] the row's features, W_b [out_dim, R], a_b [out_dim]
    and R the width of z. A and G are linear layers with bias; G's bias holds the weights that all rows share.
    In addition to the shared layers, this costs 2 n R out_dim FLOP for the items, 2 B context_dim (R + 1)
    out_dim FLOP for the weights, and memory for B matrices and for items padded to the longest row.

    Args:
        config: the widths of the layers.
        in_dim: width of x.
        context_dim: C, width of a row's features.
        out_dim: width of y.

    Raises:
        ValueError: there are no features to compute weights from.
    """

    def __init__(self, config: pb.ContextualizedMlp, *, in_dim: int, context_dim: int, out_dim: int):
        super().__init__()
        if context_dim == 0:
            raise ValueError(
                "a contextualized layer makes its weights of USER features, and no feature has the side USER"
            )
        layers: list[nn.Module] = []
        for width in config.hidden:
            layers += [nn.Linear(in_dim, width), nn.SiLU()]
            in_dim = width
        if config.HasField("rank"):
            layers.append(nn.Linear(in_dim, config.rank, bias=False))
            in_dim = config.rank
        self.shared = nn.Sequential(*layers)
        self.in_dim, self.out_dim = in_dim, out_dim
        hidden = config.context_dim
        self.compress = nn.Sequential(nn.Linear(context_dim, hidden), LayerNorm(hidden), nn.SiLU())
        self.generate = nn.Linear(hidden, out_dim * (in_dim + 1))
        nn.init.uniform_(self.generate.bias, -(in_dim**-0.5), in_dim**-0.5)
        nn.init.normal_(self.generate.weight, std=DEVIATION * (hidden * in_dim) ** -0.5)

    def forward(self, x: Tensor, rows: RowContext) -> Tensor:
        """Applies the weights of its row to each item.

        Args:
            x: [n, in_dim].
            rows: the rows that the items belong to.

        Returns:
            [n, out_dim].
        """
        z = self.shared(x)
        generated = self.generate(self.compress(rows.features)).unflatten(1, (self.out_dim, self.in_dim + 1))
        layout = rows.layout
        # Each row has its own matrix, so rows are multiplied as a batch, padded to the same length.
        shape = (layout.batch_size, layout.max_len)
        index = layout.padded_index().index.flatten()
        place = layout.sample_ids() * layout.max_len + layout.positions()
        padded = gather_rows(z, index, place).unflatten(0, shape)
        products = torch.bmm(padded, generated[:, :, :-1].transpose(1, 2)) + generated[:, None, :, -1]
        return gather_rows(products.flatten(0, 1), place, index)

    def flops(self, items: int, rows: int) -> int:
        """Counts the FLOP for `items` items of `rows` rows; see `recsys.modules.flops`."""
        weights = linear_flops(self.compress, rows) + linear_flops(self.generate, rows)
        return linear_flops(self.shared, items) + weights + 2 * items * self.in_dim * self.out_dim
