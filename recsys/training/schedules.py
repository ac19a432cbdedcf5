"""The learning rate over the steps, as a factor of its peak: a pure function, so there is no state to save.

Each decay is registered under its message. Another package adds one in the same way.
"""

import math
from collections.abc import Callable
from typing import Any

from recsys import protos as pb
from recsys.config import registry


class Decay:
    """Computes the factor of every learning rate from its peak on; each decay overrides `factor`.

    Attributes:
        config: the decay's message.
    """

    def __init__(self, config: Any):
        self.config = config

    def factor(self, step: int, length: int) -> float:
        """Returns the factor of a step.

        Args:
            step: distance to the step with the peak, at least 1; it may lie behind the end of the run.
            length: distance of the first step behind the run's end to the one with the peak; it may be 0 or
                negative if the run ends within its warm-up.
        """
        raise NotImplementedError


@registry.register(pb.ConstantDecay)
class ConstantDecay(Decay):
    """Stays at 1."""

    def factor(self, step: int, length: int) -> float:
        """Returns 1."""
        return 1.0


@registry.register(pb.LinearDecay)
class LinearDecay(Decay):
    """Falls on a line to its final factor, which it reaches one step behind the last and keeps."""

    def factor(self, step: int, length: int) -> float:
        """Returns the factor of a step."""
        return 1 + (self.config.final_factor - 1) * _progress(step, length)


@registry.register(pb.CosineDecay)
class CosineDecay(Decay):
    """Falls on half a cosine to its final factor, which it reaches one step behind the last and keeps."""

    def factor(self, step: int, length: int) -> float:
        """Returns the factor of a step."""
        return _half_cosine(_progress(step, length), self.config.final_factor)


@registry.register(pb.StepDecay)
class StepDecay(Decay):
    """Falls by a factor every so many steps, as torch.optim.lr_scheduler.StepLR."""

    def factor(self, step: int, length: int) -> float:
        """Returns the factor of a step."""
        return self.config.factor ** (step // self.config.every_steps)


@registry.register(pb.PolynomialDecay)
class PolynomialDecay(Decay):
    """Falls with a power of the share of steps that are left, as torch.optim.lr_scheduler.PolynomialLR."""

    def factor(self, step: int, length: int) -> float:
        """Returns the factor of a step."""
        final = self.config.final_factor
        return final + (1 - final) * (1 - _progress(step, length)) ** self.config.power


@registry.register(pb.CosineRestarts)
class CosineRestarts(Decay):
    """Half cosines one after the other, as torch.optim.lr_scheduler.CosineAnnealingWarmRestarts."""

    def factor(self, step: int, length: int) -> float:
        """Returns the factor of a step."""
        period = self.config.first_steps
        while step >= period and self.config.growth > 1:
            step, period = step - period, period * self.config.growth
        return _half_cosine(step % period / period, self.config.final_factor)


def curve(config: pb.Schedule, total_steps: int) -> Callable[[int], float]:
    """Returns the function from a step to its factor of every learning rate.

    The factor grows on a line over `warmup_steps` (the first step has 1 / warmup_steps, the last of them 1),
    then follows the chosen decay. A decay that ends with the run reaches its final factor one step behind the
    last: with 0 in the last step, that step's batch would be read for nothing.

    Args:
        config: resolved; one of its decays is set.
        total_steps: steps of the whole run.

    Returns:
        A function of the steps done before a step: 0 for the first, `total_steps` - 1 for the last.

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
    """The share of the steps that are done, at most 1."""
    return min(step / length, 1.0) if length > 0 else 1.0


def _half_cosine(progress: float, final: float) -> float:
    return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2
