"""The optimizers of sharded tables that a config can choose, each registered under its message.

FBGEMM trains tables inside the backward pass; a class here only names one of its optimizers. Left out on
purpose: optimizers of FBGEMM that TorchRec cannot save and shard again.
"""

from typing import Any

from recsys import protos as pb
from recsys.config.registry import register


class SparseOptimizer:
    """Names an optimizer of FBGEMM and its settings.

    Attributes:
        config: the message.
        lr: learning rate at the schedule's peak.
    """

    def __init__(self, config: Any):
        self.config = config
        self.lr: float = config.lr

    def fused_params(self) -> dict[str, Any]:
        """Arguments of FBGEMM's kernels beside the learning rate; `optimizer` is a value of EmbOptimType."""
        raise NotImplementedError


@register(pb.RowWiseAdagrad)
class RowWiseAdagrad(SparseOptimizer):
    """Adagrad with one accumulator a row, the mean of its squared gradients."""

    def fused_params(self) -> dict[str, Any]:
        """Arguments of FBGEMM's kernels."""
        return {"optimizer": "exact_row_wise_adagrad", "eps": self.config.eps}


@register(pb.SparseAdam)
class SparseAdam(SparseOptimizer):
    """Adam; only rows that were looked up move, and their moments."""

    def fused_params(self) -> dict[str, Any]:
        """Arguments of FBGEMM's kernels."""
        return {"optimizer": "adam", **_adam(self.config)}


@register(pb.PartialRowWiseAdam)
class PartialRowWiseAdam(SparseOptimizer):
    """Adam with one second moment a row."""

    def fused_params(self) -> dict[str, Any]:
        """Arguments of FBGEMM's kernels."""
        return {"optimizer": "partial_row_wise_adam", **_adam(self.config)}


@register(pb.SparseSgd)
class SparseSgd(SparseOptimizer):
    """Plain descent, with the gradients of a repeated id added up first."""

    def fused_params(self) -> dict[str, Any]:
        """Arguments of FBGEMM's kernels."""
        return {"optimizer": "exact_sgd"}


@register(pb.SparseAdagrad)
class SparseAdagrad(SparseOptimizer):
    """Adagrad with an accumulator for each number."""

    def fused_params(self) -> dict[str, Any]:
        """Arguments of FBGEMM's kernels."""
        return {"optimizer": "exact_adagrad", "eps": self.config.eps}


def _adam(config: Any) -> dict[str, Any]:
    return {"beta1": config.beta1, "beta2": config.beta2, "eps": config.eps}
