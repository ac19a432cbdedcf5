"""The optimizers of dense parameters that a config can choose, each registered under its message.

`optimizers.dense_optimizer` sorts parameters into groups, builds the chosen one and drives it. Another
package adds one in the same way as those below.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from recsys import protos as pb
from recsys.config.registry import register
from recsys.training.lamb import LambOptimizer


@dataclass(frozen=True)
class DenseGroup:
    """Dense parameters that are trained alike.

    Attributes:
        parameters: float32, in the order of the model.
        are_matrices: they are weights of linear layers; other parameters are biases, norms, tables and other
            learned vectors.
        weight_decay: their weight decay.
        lr_scale: factor of their learning rate.
    """

    parameters: list[nn.Parameter]
    are_matrices: bool
    weight_decay: float
    lr_scale: float = 1.0

    def for_torch(self) -> dict[str, Any]:
        """The group in the form of torch.optim; `optimizers` reads its `lr_scale`."""
        return {
            "params": self.parameters,
            "weight_decay": self.weight_decay,
            "lr_scale": self.lr_scale,
        }


class DenseOptimizer:
    """Builds optimizers of dense parameters from a message.

    Attributes:
        config: the message.
        lr: learning rate at the schedule's peak.
        weight_decay: of matrices, where `groups` give no other.
    """

    def __init__(self, config: Any):
        self.config = config
        self.lr: float = config.lr
        self.weight_decay: float = config.weight_decay

    def build(self, groups: Sequence[DenseGroup]) -> list[torch.optim.Optimizer]:
        """Builds optimizers that train each parameter of the groups once.

        Their state must be tensors, a count of steps among them called `step`, and must be there after a
        first step. The rate of each of their `param_groups` is set before every step; it is 0 at first.
        """
        raise NotImplementedError


@register(pb.AdamW)
class AdamW(DenseOptimizer):
    """torch.optim.AdamW."""

    def build(self, groups: Sequence[DenseGroup]) -> list[torch.optim.Optimizer]:
        """Builds it."""
        return [_adamw(groups, self.config)]


@register(pb.Sgd)
class Sgd(DenseOptimizer):
    """torch.optim.SGD."""

    def build(self, groups: Sequence[DenseGroup]) -> list[torch.optim.Optimizer]:
        """Builds it."""
        config = self.config
        listed = [group.for_torch() for group in groups]
        return [
            torch.optim.SGD(listed, lr=0.0, momentum=config.momentum, nesterov=config.nesterov, fused=True)
        ]


@register(pb.Adagrad)
class Adagrad(DenseOptimizer):
    """torch.optim.Adagrad."""

    def build(self, groups: Sequence[DenseGroup]) -> list[torch.optim.Optimizer]:
        """Builds it."""
        return [torch.optim.Adagrad([group.for_torch() for group in groups], lr=0.0, eps=self.config.eps)]


@register(pb.Lamb)
class Lamb(DenseOptimizer):
    """`lamb.LambOptimizer`, since torch has none."""

    def build(self, groups: Sequence[DenseGroup]) -> list[torch.optim.Optimizer]:
        """Builds it."""
        config = self.config
        betas = (config.beta1, config.beta2)
        return [LambOptimizer([group.for_torch() for group in groups], lr=0.0, betas=betas, eps=config.eps)]


@register(pb.Muon)
class Muon(DenseOptimizer):
    """torch.optim.Muon for matrices, torch.optim.AdamW for other parameters."""

    def build(self, groups: Sequence[DenseGroup]) -> list[torch.optim.Optimizer]:
        """Builds those of the two that have parameters to train."""
        matrices = [group.for_torch() for group in groups if group.are_matrices]
        rest = [group for group in groups if not group.are_matrices]
        optimizers: list[torch.optim.Optimizer] = []
        if matrices:
            optimizers.append(
                torch.optim.Muon(
                    matrices, lr=0.0, momentum=self.config.momentum, adjust_lr_fn="match_rms_adamw"
                )
            )
        return [*optimizers, _adamw(rest, self.config)] if rest else optimizers


def _adamw(groups: Sequence[DenseGroup], config: Any) -> torch.optim.AdamW:
    betas = (config.beta1, config.beta2)
    listed = [group.for_torch() for group in groups]
    return torch.optim.AdamW(listed, lr=0.0, betas=betas, eps=config.eps, fused=True)
