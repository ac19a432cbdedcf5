"""Runs a learning-rate range test (Smith 2017): the rate grows with each step while the loss is recorded.

A new model trains some steps on the config's data while the rate grows evenly on a log scale. The suggested
rate is the one at which the smoothed loss falls fastest. Nothing is kept.
"""

import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from recsys import protos as pb
from recsys.errors import ConfigError, NonFiniteLossError
from recsys.training.distributed import Processes
from recsys.training.session import open_session

LOWEST, HIGHEST = 1e-5, 1.0
STEPS = 100
SMOOTHING = 0.8
"""Share of the smoothed loss that each step keeps, 0 to 1."""

DIVERGED = 2.0
"""The test ends when the smoothed loss is this many times the lowest one."""


class RateTest(NamedTuple):
    """The rates that were tried, the smoothed loss after each, and the suggested rate."""

    rates: list[float]
    losses: list[float]
    suggested: float


def find_rate(pipeline: pb.Pipeline, processes: Processes) -> RateTest:
    """Runs the test for a resolved config. Collective.

    The rate of sharded tables grows by the same factor as the rate of the dense optimizer.

    Raises:
        ConfigError: the loss never fell.
    """
    tried = pb.Pipeline()
    tried.CopyFrom(pipeline)
    tried.train.num_steps = STEPS
    tried.train.schedule.Clear()
    tried.train.schedule.constant.SetInParent()
    tried.data.num_workers = 0
    with tempfile.TemporaryDirectory() as folder:
        session = open_session(tried, Path(folder), processes)
        optimizer, peaks = session.optimizer, dict(session.optimizer.peaks)
        rates, losses = [], []
        with closing(session.batches()) as batches:
            for step in range(STEPS):
                rate = LOWEST * (HIGHEST / LOWEST) ** (step / (STEPS - 1))
                optimizer.peaks = {name: peak * rate / peaks["dense"] for name, peak in peaks.items()}
                total = 0.0
                for _ in range(session.accumulate):
                    optimizer.zero_grad()
                    loss, pending = session.wrapped(next(batches).to(processes.device))
                    try:
                        result = pending.wait()
                    except NonFiniteLossError:
                        return _tested(rates, losses)
                    loss.backward()
                    optimizer.step()
                    total += result.loss / session.accumulate
                rates.append(rate)
                losses.append(total if not losses else SMOOTHING * losses[-1] + (1 - SMOOTHING) * total)
                if losses[-1] > DIVERGED * min(losses):
                    break
    return _tested(rates, losses)


def _tested(rates: list[float], losses: list[float]) -> RateTest:
    return RateTest(rates, losses, suggest(rates, losses))


def suggest(rates: Sequence[float], losses: Sequence[float]) -> float:
    """Returns the rate around which the loss falls fastest, rounded to one significant digit.

    The fall is measured over stretches of a tenth of the tried rates; the result is the rate in the middle of
    the steepest stretch.

    Raises:
        ConfigError: the loss never fell.
    """
    stretch = max(1, len(losses) // 10)
    falls = [losses[place] - losses[place + stretch] for place in range(len(losses) - stretch)]
    if not falls or max(falls) <= 0:
        raise ConfigError("--find-lr: the loss fell at no rate; check the data and the rest of the config")
    return float(f"{rates[falls.index(max(falls)) + stretch // 2]:.0e}")
