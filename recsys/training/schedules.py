"""Computes the learning rate of a step as a factor of its peak.

The factor is a pure function of the step, so there is no state to save. Each decay is registered under its
message; another package adds a decay in the same way.
"""

import math
from collections.abc import Callable
from typing import Any

from recsys import protos as pb
from recsys.config import registry


class Decay:
    """Base class of decays, which compute the factor of the learning rates after their peak.

    Attributes:
        config: the decay's message.
    """

    def __init__(self, config: Any):
        self.config = config

    def factor(self, step: int, length: int) -> float:
        """Returns the factor of a step.

        Each decay overrides this method.

        Args:
            step: number of steps since the peak, at least 1; the step may lie after the end of the run.
            length: number of steps from the peak to the first step after the run's end; it may be 0 or
                negative if the run ends during its warm-up.
        """
        raise NotImplementedError


@registry.register(pb.ConstantDecay)
class ConstantDecay(Decay):
    """Keeps the factor at 1."""

    def factor(self, step: int, length: int) -> float:
        """Returns 1."""
        return 1.0


@registry.register(pb.LinearDecay)
class LinearDecay(Decay):
    """Falls linearly to the final factor, which it reaches one step after the last step and keeps."""

    def factor(self, step: int, length: int) -> float:
        """Returns the factor of a step."""
        return 1 + (self.config.final_factor - 1) * _progress(step, length)


@registry.register(pb.CosineDecay)
class CosineDecay(Decay):
    """Falls as half a cosine to the final factor, which it reaches one step after the last step and keeps."""

    def factor(self, step: int, length: int) -> float:
        """Returns the factor of a step."""
        return _half_cosine(_progress(step, length), self.config.final_factor)


@registry.register(pb.StepDecay)
class StepDecay(Decay):
    """Multiplies by a factor every `every_steps` steps, like torch.optim.lr_scheduler.StepLR."""

    def factor(self, step: int, length: int) -> float:
        """Returns the factor of a step."""
        return self.config.factor ** (step // self.config.every_steps)


@registry.register(pb.PolynomialDecay)
class PolynomialDecay(Decay):
    """Falls with a power of the share of remaining steps, like torch.optim.lr_scheduler.PolynomialLR."""

    def factor(self, step: int, length: int) -> float:
        """Returns the factor of a step."""
        final = self.config.final_factor
        return final + (1 - final) * (1 - _progress(step, length)) ** self.config.power


@registry.register(pb.CosineRestarts)
class CosineRestarts(Decay):
    """Repeats half cosines, like torch.optim.lr_scheduler.CosineAnnealingWarmRestarts."""

    def factor(self, step: int, length: int) -> float:
        """Returns the factor of a step."""
        period = self.config.first_steps
        while step >= period and self.config.growth > 1:
            step, period = step - period, period * self.config.growth
        return _half_cosine(step % period / period, self.config.final_factor)


def curve(config: pb.Schedule, total_steps: int) -> Callable[[int], float]:
    """Returns the function that maps a step to the factor of every learning rate.

    The factor grows linearly over `warmup_steps`, from 1 / warmup_steps in the first step to 1 in the last
    warm-up step, then follows the chosen decay. A decay that ends with the run reaches its final factor one
    step after the last step: with a factor of 0, the last step would read its batch for nothing.

    Args:
        config: the resolved message, with a decay set.
        total_steps: steps of the whole run.

    Returns:
        A function of the number of steps done before: 0 for the first step, `total_steps` - 1 for the last.

    Raises:
        ValueError: no decay is set.
    """
    chosen = registry.pick(config)
    decay, warmup = chosen.cls(chosen.config), config.warmup_steps
    peak = max(warmup - 1, 0)

    def factor_of(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 1.0 if step <= peak else decay.factor(step - peak, total_steps - peak)

    return factor_of


def factor(step: int, config: pb.Schedule, total_steps: int) -> float:
    """Returns the factor of every learning rate in one step; see `curve`."""
    return curve(config, total_steps)(step)


def _progress(step: int, length: int) -> float:
    """Returns the share of the steps after the peak that are done, at most 1."""
    return min(step / length, 1.0) if length > 0 else 1.0


def _half_cosine(progress: float, final: float) -> float:
    return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2
