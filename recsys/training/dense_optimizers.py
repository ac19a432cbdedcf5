"""The optimizers of dense parameters that a config can choose, each registered under its message.

`optimizers.dense_optimizer` sorts parameters into groups, then builds and drives the chosen optimizer.
Another package adds an optimizer in the same way as this file does.
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
    """Dense parameters that share their settings.

    Attributes:
        parameters: float32 parameters, in the order of the model.
        are_matrices: True for weights of linear layers; False for biases, norms, tables and other learned
            vectors.
        weight_decay: weight decay of these parameters.
        lr_scale: factor of the learning rate.
    """

    parameters: list[nn.Parameter]
    are_matrices: bool
    weight_decay: float
    lr_scale: float = 1.0

    def for_torch(self) -> dict[str, Any]:
        """Returns the group as a torch.optim parameter group; `optimizers` reads its `lr_scale`."""
        return {
            "params": self.parameters,
            "weight_decay": self.weight_decay,
            "lr_scale": self.lr_scale,
        }


class DenseOptimizer:
    """Builds optimizers of dense parameters from a config message.

    Attributes:
        config: the optimizer's message.
        lr: learning rate at the schedule's peak.
        weight_decay: weight decay of matrices, unless a group in the config sets another.
        state_copies: number of tensors in the optimizer's state that are as large as a parameter, at most.
        recordable: whether a CUDA graph can hold its steps, with learning rates in tensors.
    """

    state_copies: int = 2
    recordable: bool = False

    def __init__(self, config: Any):
        self.config = config
        self.lr: float = config.lr
        self.weight_decay: float = config.weight_decay

    def build(self, groups: Sequence[DenseGroup]) -> list[torch.optim.Optimizer]:
        """Builds optimizers that together train each parameter of the groups exactly once.

        Their state must consist of tensors and be complete after the first step; a step count must be called
        `step`. Set the learning rate to 0 here: the caller sets it in each of `param_groups` before every
        step.
        """
        raise NotImplementedError


@register(pb.AdamW)
class AdamW(DenseOptimizer):
    """Trains all parameters by torch.optim.AdamW."""

    recordable = True

    def build(self, groups: Sequence[DenseGroup]) -> list[torch.optim.Optimizer]:
        """Builds one torch.optim.AdamW."""
        return [_adamw(groups, self.config)]


@register(pb.Sgd)
class Sgd(DenseOptimizer):
    """Trains all parameters by torch.optim.SGD."""

    state_copies = 1

    def build(self, groups: Sequence[DenseGroup]) -> list[torch.optim.Optimizer]:
        """Builds one torch.optim.SGD."""
        config = self.config
        listed = [group.for_torch() for group in groups]
        return [
            torch.optim.SGD(listed, lr=0.0, momentum=config.momentum, nesterov=config.nesterov, fused=True)
        ]


@register(pb.Adagrad)
class Adagrad(DenseOptimizer):
    """Trains all parameters by torch.optim.Adagrad."""

    state_copies = 1

    def build(self, groups: Sequence[DenseGroup]) -> list[torch.optim.Optimizer]:
        """Builds one torch.optim.Adagrad."""
        return [torch.optim.Adagrad([group.for_torch() for group in groups], lr=0.0, eps=self.config.eps)]


@register(pb.Lamb)
class Lamb(DenseOptimizer):
    """Trains all parameters by `lamb.LambOptimizer`, since torch has no LAMB."""

    def build(self, groups: Sequence[DenseGroup]) -> list[torch.optim.Optimizer]:
        """Builds one `LambOptimizer`."""
        config = self.config
        betas = (config.beta1, config.beta2)
        return [LambOptimizer([group.for_torch() for group in groups], lr=0.0, betas=betas, eps=config.eps)]


@register(pb.Muon)
class Muon(DenseOptimizer):
    """Trains matrices by torch.optim.Muon and other parameters by torch.optim.AdamW."""

    def build(self, groups: Sequence[DenseGroup]) -> list[torch.optim.Optimizer]:
        """Builds Muon, AdamW or both, depending on which kinds of parameters there are."""
        matrices = [group.for_torch() for group in groups if group.are_matrices]
        adamw_groups = [group for group in groups if not group.are_matrices]
        optimizers: list[torch.optim.Optimizer] = []
        if matrices:
            optimizers.append(
                torch.optim.Muon(
                    matrices, lr=0.0, momentum=self.config.momentum, adjust_lr_fn="match_rms_adamw"
                )
            )
        return [*optimizers, _adamw(adamw_groups, self.config)] if adamw_groups else optimizers


def _adamw(groups: Sequence[DenseGroup], config: Any) -> torch.optim.AdamW:
    betas = (config.beta1, config.beta2)
    listed = [group.for_torch() for group in groups]
    return torch.optim.AdamW(listed, lr=0.0, betas=betas, eps=config.eps, fused=True)
