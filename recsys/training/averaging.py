"""The average of the weights along a run, as `train.weight_averaging` asks for it.

Evaluation, the best state and export use the average; training goes on with the weights themselves. How often
the average has moved follows from the step, so there is no state beside its tensors, which checkpoints hold
behind `checkpoint.AVERAGE`. Every rank averages what it holds: its part of a sharded table, and all of the
rest. The arithmetic is that of `torch.optim.swa_utils`; its `AveragedModel` is a deep copy of a module, which
a model with sharded tables does not allow.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import Shard
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn
from torchrec.distributed.types import ShardedTensor

from recsys import protos as pb
from recsys.training.checkpoint import AVERAGE, MODEL, Tensors, local_parts

_CHUNK = 2**24
"""Numbers swapped at a time, which takes 64 MiB of float32 beside both copies."""


class WeightAverage:
    """An average of weights, none of which has counted yet.

    Args:
        weights: of the model by name behind `MODEL`, as they are trained in place: `state_dict()` of a model
            over ranks. Numbers that are not floating point are left out.
        constants: names among them that are no parameters.
        config: resolved.
    """

    def __init__(self, weights: Tensors, constants: Collection[str], config: pb.WeightAveraging):
        kept = {
            name: weight
            for name, weight in weights.items()
            if name not in constants and (isinstance(weight, ShardedTensor) or weight.is_floating_point())
        }
        self._averages = {name: _copy(weight) for name, weight in kept.items()}
        self._live, self._average = local_parts(kept), local_parts(self._averages)
        self._config = config
        chosen = config.swa if config.HasField("swa") else config.ema
        self._every = chosen.every_steps
        self._first = config.swa.start_step if config.HasField("swa") else self._every

    def updates(self, step: int) -> int:
        """Number of times the average has been updated when `step` steps are done."""
        return 0 if step < self._first else (step - self._first) // self._every + 1

    def update(self, step: int) -> None:
        """Adds the weights after `step` steps to the average if they count. Call it after every step."""
        number = self.updates(step)
        if number == self.updates(step - 1) or not self._live:
            return
        if self._config.HasField("swa"):
            get_swa_multi_avg_fn()(self._average, self._live, number - 1)
        else:
            get_ema_multi_avg_fn(ema_decay(self._config.ema, number))(self._average, self._live, number)

    @contextmanager
    def in_place(self, step: int) -> Iterator[None]:
        """Swaps the average into the model for this block; before the first update the weights stay."""
        if not self.updates(step):
            yield
            return
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def take_over(self, step: int) -> None:
        """Puts the average into the model for good. The model must not be trained or saved afterwards."""
        if self.updates(step):
            self._exchange()

    def tensors(self, step: int) -> dict[str, Tensor | ShardedTensor]:
        """Tensors that a checkpoint stores under `AVERAGE`; evaluation uses them at any step."""
        if not self.updates(step):
            for average, weight in zip(self._average, self._live, strict=True):
                average.copy_(weight)
        return {AVERAGE + name.removeprefix(MODEL): average for name, average in self._averages.items()}

    @torch.no_grad()
    def _exchange(self) -> None:
        for weight, average in zip(self._live, self._average, strict=True):
            chunks = zip(weight.view(-1).split(_CHUNK), average.view(-1).split(_CHUNK), strict=True)
            for one, other in chunks:
                kept = one.clone()
                one.copy_(other)
                other.copy_(kept)


def ema_decay(config: pb.Ema, number: int) -> float:
    """Share of the average that its update `number`, from 1 on, keeps; the first one keeps nothing.

    Source: the decay of TensorFlow's `ExponentialMovingAverage` with `num_updates`, counted behind the first.
    """
    return min(config.decay, (number - 1) / (number + 8))


def describe(config: pb.WeightAveraging) -> str:
    """Describes a resolved config in words."""
    if config.HasField("swa"):
        swa = config.swa
        return f"mean of the weights after every {swa.every_steps} step(s) from step {swa.start_step} on"
    return f"exponential moving average, decay {config.ema.decay:g}, every {config.ema.every_steps} step(s)"


def _copy(tensor: Tensor | ShardedTensor) -> Tensor | ShardedTensor:
    if not isinstance(tensor, ShardedTensor):
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    shards = [Shard(own.tensor.detach().clone(), own.metadata) for own in tensor.local_shards()]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, tensor.metadata(), process_group=tensor._process_group
    )
