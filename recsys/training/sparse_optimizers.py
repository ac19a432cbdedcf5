"""The optimizers of sharded tables that a config can choose, each registered under its message.

FBGEMM trains tables inside the backward pass; a class here only names one of FBGEMM's optimizers. Optimizers
that TorchRec cannot save and reshard are left out on purpose.
"""

from typing import Any

from recsys import protos as pb
from recsys.config.registry import register


class SparseOptimizer:
    """Names one of FBGEMM's optimizers and its settings.

    Attributes:
        config: the optimizer's message.
        lr: learning rate at the schedule's peak.
    """

    def __init__(self, config: Any):
        self.config = config
        self.lr: float = config.lr

    def fused_params(self) -> dict[str, Any]:
        """Returns the arguments of FBGEMM's kernels except the learning rate.

        The entry `optimizer` is a value of EmbOptimType.
        """
        raise NotImplementedError

    def numbers_per_row(self, width: int) -> int:
        """Returns how many float32 numbers the state has, at most, for a row of `width` numbers."""
        return 2 * width


@register(pb.RowWiseAdagrad)
class RowWiseAdagrad(SparseOptimizer):
    """Adagrad with one accumulator per row: the sum of the row's mean squared gradients."""

    def fused_params(self) -> dict[str, Any]:
        """Returns the arguments of FBGEMM's kernels."""
        return {"optimizer": "exact_row_wise_adagrad", "eps": self.config.eps}

    def numbers_per_row(self, width: int) -> int:
        """Returns the size of the state of a row."""
        return 1


@register(pb.SparseAdam)
class SparseAdam(SparseOptimizer):
    """Adam that updates only looked-up rows and their moments."""

    def fused_params(self) -> dict[str, Any]:
        """Returns the arguments of FBGEMM's kernels."""
        return {"optimizer": "adam", **_adam(self.config)}


@register(pb.PartialRowWiseAdam)
class PartialRowWiseAdam(SparseOptimizer):
    """Adam with one second moment per row."""

    def fused_params(self) -> dict[str, Any]:
        """Returns the arguments of FBGEMM's kernels."""
        return {"optimizer": "partial_row_wise_adam", **_adam(self.config)}

    def numbers_per_row(self, width: int) -> int:
        """Returns the size of the state of a row."""
        return width + 1


@register(pb.SparseSgd)
class SparseSgd(SparseOptimizer):
    """Plain gradient descent; gradients of a repeated id are summed first."""

    def fused_params(self) -> dict[str, Any]:
        """Returns the arguments of FBGEMM's kernels."""
        return {"optimizer": "exact_sgd"}

    def numbers_per_row(self, width: int) -> int:
        """Returns the size of the state of a row."""
        return 0


@register(pb.SparseAdagrad)
class SparseAdagrad(SparseOptimizer):
    """Adagrad with one accumulator per element."""

    def fused_params(self) -> dict[str, Any]:
        """Returns the arguments of FBGEMM's kernels."""
        return {"optimizer": "exact_adagrad", "eps": self.config.eps}

    def numbers_per_row(self, width: int) -> int:
        """Returns the size of the state of a row."""
        return width


def _adam(config: Any) -> dict[str, Any]:
    return {"beta1": config.beta1, "beta2": config.beta2, "eps": config.eps}
