"""Averages the weights over the steps of a run, as `train.weight_averaging` configures it.

Evaluation, the best state and export use the average; training continues with the weights themselves. The
number of updates follows from the step, so the average has no state but its tensors, which checkpoints store
under the prefix `checkpoint.AVERAGE`. Each rank averages its own shards of the tables and all other weights.
The arithmetic is that of `torch.optim.swa_utils`. Its `AveragedModel` cannot be used here: it copies the
whole module, which a model with sharded tables does not allow.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn
from torchrec.distributed.types import ShardedTensor

from recsys import protos as pb
from recsys.training.checkpoint import AVERAGE, MODEL, Tensors, local_parts
from recsys.training.host_copies import copied

_CHUNK = 2**24
"""Number of elements swapped at a time. The temporary copy takes 64 MiB of float32."""


class WeightAverage:
    """Maintains the average of a model's weights.

    Args:
        weights: the `state_dict()` of the (sharded) model, with names that begin with `MODEL`. The tensors
            are trained in place. Those that are not floating point are not averaged.
        constants: names among `weights` that belong to buffers; they are not averaged either.
        config: the resolved `train.weight_averaging`.
    """

    def __init__(self, weights: Tensors, constants: Collection[str], config: pb.WeightAveraging):
        kept = {
            name: weight
            for name, weight in weights.items()
            if name not in constants and (isinstance(weight, ShardedTensor) or weight.is_floating_point())
        }
        self._averages = {name: copied(weight) for name, weight in kept.items()}
        self._live, self._average = local_parts(kept), local_parts(self._averages)
        self._config = config
        chosen = config.swa if config.HasField("swa") else config.ema
        self._every = chosen.every_steps
        self._first = config.swa.start_step if config.HasField("swa") else self._every

    def updates(self, step: int) -> int:
        """Returns how often the average has been updated after `step` steps."""
        return 0 if step < self._first else (step - self._first) // self._every + 1

    def update(self, step: int) -> None:
        """Updates the average if one is due after `step` steps. Call it after every step."""
        number = self.updates(step)
        if number == self.updates(step - 1) or not self._live:
            return
        if self._config.HasField("swa"):
            get_swa_multi_avg_fn()(self._average, self._live, number - 1)
        else:
            get_ema_multi_avg_fn(ema_decay(self._config.ema, number))(self._average, self._live, number)

    @contextmanager
    def in_place(self, step: int) -> Iterator[None]:
        """Puts the average into the model within the block. Before the first update it changes nothing."""
        if not self.updates(step):
            yield
            return
        self._exchange()
        try:
            yield
        finally:
            self._exchange(back=True)

    def take_over(self, step: int) -> None:
        """Puts the average into the model permanently; do not train or save the model afterwards."""
        if self.updates(step):
            self._exchange()

    def tensors(self, step: int) -> dict[str, Tensor | ShardedTensor]:
        """Returns the tensors that a checkpoint stores, with names that begin with `AVERAGE`.

        Before the first update they are the weights, so a checkpoint can be evaluated at any step.
        """
        if not self.updates(step):
            for average, weight in zip(self._average, self._live, strict=True):
                average.copy_(weight)
        return {AVERAGE + name.removeprefix(MODEL): average for name, average in self._averages.items()}

    @torch.no_grad()
    def _exchange(self, *, back: bool = False) -> None:
        pairs = list(zip(self._live, self._average, strict=True))
        # A weight with two names has two averages, so it is itself again only after the reverse order.
        for weight, average in reversed(pairs) if back else pairs:
            chunks = zip(weight.view(-1).split(_CHUNK), average.view(-1).split(_CHUNK), strict=True)
            for weight_chunk, average_chunk in chunks:
                weight_copy = weight_chunk.clone()
                weight_chunk.copy_(average_chunk)
                average_chunk.copy_(weight_copy)


def ema_decay(config: pb.Ema, number: int) -> float:
    """Returns the share, 0 to 1, of the old average that update `number` keeps. Update 1 keeps nothing.

    Source: the decay of TensorFlow's `ExponentialMovingAverage`, whose `num_updates` is `number - 1` here.
    """
    return min(config.decay, (number - 1) / (number + 8))


def describe(config: pb.WeightAveraging) -> str:
    """Describes a resolved config in words, for the log."""
    if config.HasField("swa"):
        swa = config.swa
        return f"mean of the weights after every {swa.every_steps} step(s) from step {swa.start_step} on"
    return f"exponential moving average, decay {config.ema.decay:g}, every {config.ema.every_steps} step(s)"
