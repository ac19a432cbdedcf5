"""The learning rate over the steps, as a factor of its peak: a pure function, so there is no state to
save."""

import math

from recsys import protos as pb


def factor(step: int, config: pb.Schedule, total_steps: int) -> float:
    """Factor of every learning rate in one step.

    It grows on a line over `warmup_steps` (the first step has 1 / warmup_steps, the last of them 1), then
    follows the chosen decay, which reaches its final factor one step behind the last and stays there: with 0
    in the last step, that step's batch would be read for nothing.

    Args:
        step: steps done before this one: 0 for the first, `total_steps` - 1 for the last.
        config: resolved; one of its decays is set.
        total_steps: steps of the whole run.

    Raises:
        ValueError: no decay is set.
    """
    decay = config.WhichOneof("decay")
    if decay is None:
        raise ValueError("schedule: no decay is set; choose constant, linear or cosine")
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    peak = max(config.warmup_steps - 1, 0)
    if decay == "constant" or step <= peak:
        return 1.0
    final = getattr(config, decay).final_factor
    progress = min((step - peak) / (total_steps - peak), 1.0) if total_steps > peak else 1.0
    if decay == "linear":
        return 1 + (final - 1) * progress
    return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2
