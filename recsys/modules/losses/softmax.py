"""`SoftmaxLoss`: the loss of next-item retrieval, over the whole catalogue or over shared negatives.

The reader draws the negatives; the loss normalizes vectors on request.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recsys import protos as pb
from recsys.config.registry import register
from recsys.modules.losses.base import Kind, widen
from recsys.modules.losses.divided_softmax import CataloguePart, divided_logp
from recsys.ops import linear_logp, linear_lse
from recsys.ops.linear_logp.recompute import SHORTEST

IGNORED = -1
"""The target of a query without a target; the query contributes neither loss nor gradient."""

LOWEST = 0.01
"""Lower bound of a learned temperature. Below it, gradients of unit vectors are too large for training."""


@register(pb.SoftmaxLoss)
class SoftmaxLoss(nn.Module):
    """Computes -log softmax(<query, item> / temperature)[target].

    Scores are float32 for vectors of any dtype. A learned temperature is a + exp(b) with a constant a above
    0, so b always has a gradient.
    """

    kind: Kind = "retrieval"

    def __init__(self, config: pb.SoftmaxLoss):
        super().__init__()
        if not config.temperature > 0:
            raise ValueError(f"temperature: {config.temperature} is given; it must be above 0")
        self._given = config.temperature
        self._lowest = min(LOWEST, config.temperature / 2)
        self.register_parameter("log_excess", None)
        if config.learn_temperature:
            excess = torch.tensor([config.temperature - self._lowest], dtype=torch.float64)
            self.log_excess = nn.Parameter(excess.log().float())

    @property
    def temperature(self) -> float | Tensor:
        """Returns the config's temperature, or a tensor [1] if it is learned."""
        return self._given if self.log_excess is None else self._lowest + self.log_excess.exp()

    def forward(
        self,
        queries: Tensor,
        items: Tensor,
        targets: Tensor,
        *,
        positives: Tensor | None = None,
        item_ids: Tensor | None = None,
        log_weights: Tensor | None = None,
        l2_normalize: bool = False,
        part: CataloguePart | None = None,
    ) -> Tensor:
        """Computes the loss of each query.

        Whole catalogue: `items` holds every item, and `targets` are its rows.
        Shared negatives: `items` are drawn items with the ids `item_ids`, `positives` are the vectors of the
        targets, and `targets` are ids like `item_ids`. An item that is a query's target is left out of that
        query's sum; the positive always counts exactly once.

        Args:
            queries: [M, E].
            items: [V, E].
            targets: [M] int64, rows of `items` or ids; IGNORED where a query has no target.
            positives: [M, E]; any finite value where the target is IGNORED.
            item_ids: [V] int64.
            log_weights: [V], added to similarity / temperature of each item but not of the positive, to
                correct for how often items are drawn; None means zeros. Only for shared negatives.
            l2_normalize: whether all vectors are scaled to unit length (see `linear_logp`).
            part: this rank's part of a catalogue that ranks divide; `items` are its items only. None means
                that `items` are all.

        Returns:
            [M] float32 (float64 for float64 queries), 0 where the target is IGNORED.

        Raises:
            ValueError: only one of `positives` and `item_ids` is given, or a target is not a row of `items`
                (see `linear_logp`).
        """
        if (positives is None) != (item_ids is None):
            raise ValueError(
                "positives and item_ids belong together: give both for shared negatives, or neither"
            )
        if part is not None:
            return -divided_logp(
                queries,
                items,
                targets,
                part,
                temperature=self.temperature,
                ignore_index=IGNORED,
                l2_normalize=l2_normalize,
            )
        if positives is None:
            return -linear_logp(
                queries,
                items,
                targets,
                temperature=self.temperature,
                ignore_index=IGNORED,
                l2_normalize=l2_normalize,
            ).logp
        return self._against_drawn(queries, items, targets, positives, item_ids, log_weights, l2_normalize)

    def _against_drawn(
        self,
        queries: Tensor,
        items: Tensor,
        targets: Tensor,
        positives: Tensor,
        item_ids: Tensor | None,
        log_weights: Tensor | None,
        l2_normalize: bool,
    ) -> Tensor:
        temperature = self.temperature
        negatives = linear_lse(
            queries,
            items,
            # The op divides the bias by the temperature, like the product.
            bias=None if log_weights is None else log_weights * temperature,
            temperature=temperature,
            candidate_ids=item_ids,
            target_ids=targets,
            l2_normalize=l2_normalize,
        )
        # bfloat16 scores are too coarse for a small temperature.
        queries, positives = widen(queries), widen(positives)
        if l2_normalize:
            queries, positives = (F.normalize(rows, dim=1, eps=SHORTEST) for rows in (queries, positives))
        positive = (queries * positives).sum(1) / temperature
        # This is log(exp positive + exp negatives) - positive, precise for a nearly certain target.
        return torch.where(targets == IGNORED, 0, F.softplus(negatives - positive))

    def extra_repr(self) -> str:
        return f"temperature={self._given}{'' if self.log_excess is None else ', learned'}"
