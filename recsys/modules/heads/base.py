"""`PairInput`: combines both vectors of a candidate into one input, for all heads."""

import torch
from torch import Tensor, nn

from recsys import protos as pb


class PairInput(nn.Module):
    """Computes user * item, or concatenates both vectors and their product.

    Args:
        form: pb.Head.PRODUCT or pb.Head.CONCAT.
        embedding_dim: E, width of either vector.

    Attributes:
        width: width of the result.

    Raises:
        ValueError: `form` is neither of these.
    """

    def __init__(self, form: int, embedding_dim: int):
        super().__init__()
        widths = {pb.Head.PRODUCT: embedding_dim, pb.Head.CONCAT: 3 * embedding_dim}
        if form not in widths:
            raise ValueError(f"input: {form} is given; it must be PRODUCT or CONCAT")
        self.width = widths[form]
        self.product_only = form == pb.Head.PRODUCT

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """Maps [N, E] and [N, E] to [N, width]."""
        product = user * item
        return product if self.product_only else torch.cat([user, item, product], 1)
