"""Builds and drives the optimizers of a run: one for dense weights, a fused one for sharded tables.

The config chooses both, from those in `dense_optimizers` and `sparse_optimizers`. FBGEMM's fused optimizer
updates the looked-up rows inside the backward pass; outside, it only has to be told the learning rate.
`ScheduledOptimizer` offers both through `zero_grad` and `step`, the two calls that TorchRec's pipelines make
for every batch.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardedTensor
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from recsys import protos as pb
from recsys.config import fields, registry
from recsys.errors import ConfigError
from recsys.training.dense_optimizers import DenseGroup, DenseOptimizer
from recsys.training.loss_scaling import LossScaler
from recsys.training.names import MODEL, fits, without_match
from recsys.training.schedules import curve
from recsys.training.sparse_optimizers import SparseOptimizer

log = logging.getLogger(__name__)


class ScheduledOptimizer:
    """Combines both optimizers of a run with schedule, gradient clipping and accumulation.

    Dense gradients of `train.accumulate_batches` batches are averaged into one step. Sharded tables are
    updated with every batch, since their gradients are never stored. Gradients are already averaged over
    ranks, so every rank clips by the same norm.

    Args:
        model: a model whose sharded tables, if any, are in a `DistributedModelParallel`.
        train: the resolved message.
        total_steps: steps of the whole run, for the schedule.
        scaler: scales the loss of the model; None if the loss is not scaled.

    Raises:
        ConfigError: a pattern of `train.dense_optimizer.groups` matches no parameter.
        ValueError: there are sharded tables but no optimizer for them.

    Attributes:
        peaks: learning rates at the schedule's peak: `dense`, and `sparse` if there are sharded tables.
        steps: steps done.
        accumulated: batches since the last step; the state may be saved only when it is 0.
        last_grad_norm: norm of the dense gradients of the last step before clipping, a scalar on the device;
            None before the first step. Reading it waits for the device. Steps that the scaler skips do not
            count.
    """

    def __init__(self, model: nn.Module, train: pb.Train, total_steps: int, scaler: LossScaler | None = None):
        self.dense = dense_optimizer(model, train.dense_optimizer)
        self.fused = fused_optimizer(model)
        self.peaks = {"dense": chosen_dense(train.dense_optimizer).lr}
        if self.fused is not None:
            chosen = chosen_sparse(train.sparse_optimizer)
            if chosen is None:
                # Otherwise FBGEMM would train by SGD with its own learning rate.
                raise ValueError("tables are sharded, but train.sparse_optimizer is not set")
            self.peaks["sparse"] = chosen.lr
        self.scaler = scaler
        self._parameters = list(self.dense.params.values())
        self._factor_of = curve(train.schedule, total_steps)
        self.accumulate_batches = train.accumulate_batches
        self.max_grad_norm = train.max_grad_norm if train.HasField("max_grad_norm") else None
        self.steps = 0
        self.accumulated = 0
        self.last_grad_norm: Tensor | None = None
        self._recordable = chosen_dense(train.dense_optimizer).recordable and scaler is None
        self._run: Callable[[Callable[[], Tensor]], Tensor] = _call

    def record(self, run: Callable[[Callable[[], Tensor]], Tensor]) -> None:
        """Lets `run` call the update of the dense weights, as `Recorder.update` does, if it can be recorded.

        A learning rate is a tensor from then on, which a recorded step reads.
        """
        if not self._recordable:
            return
        for group in self.dense.param_groups:
            group["lr"] = torch.zeros((), device=group["params"][0].device)
        self._run = run

    def learning_rates(self) -> dict[str, float]:
        """Returns the current step's learning rates: `dense`, and `sparse` if there are sharded tables."""
        now = self._factor_of(self.steps)
        return {name: peak * now for name, peak in self.peaks.items()}

    def zero_grad(self) -> None:
        """Prepares both optimizers for a batch. Call it before the batch's forward pass."""
        if self.accumulated:
            return
        rates = self.learning_rates()
        for parameter in self._parameters:
            parameter.grad = None
        _set_rate(self.dense, rates["dense"])
        if self.fused is not None:
            _set_rate(self.fused, rates["sparse"])
            # This passes the learning rate to the kernels; there are no gradients to clear.
            self.fused.zero_grad()

    def step(self) -> None:
        """Counts a batch and updates the dense weights after the last batch of a step.

        Call it after the batch's backward pass, which has already updated sharded tables.
        """
        self.accumulated += 1
        if self.accumulated < self.accumulate_batches:
            return
        self.accumulated = 0
        self.steps += 1
        if self.scaler is None:
            self.last_grad_norm = self._run(self._update)
            return
        norm = self._clip()
        if self.scaler.step(self.dense, self.steps):
            self.last_grad_norm = norm

    def _update(self) -> Tensor:
        """Clips the gradients, updates the dense weights, and returns the norm before clipping."""
        norm = self._clip()
        if self._run is not _call:
            # PyTorch refuses to record a step without this setting, and warns of it in other steps.
            recording = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
            for group in self.dense.param_groups:
                group["capturable"] = recording
        self.dense.step()
        return norm

    def _clip(self) -> Tensor:
        parameters = [p for p in self.dense.params.values() if p.grad is not None]
        gradients = [p.grad for p in parameters]
        if self.accumulate_batches > 1:
            for gradient in gradients:
                gradient.div_(self.accumulate_batches)
        if self.scaler is not None:
            self.scaler.unscale(self.dense, gradients)
        norm = get_total_norm(gradients)
        if self.max_grad_norm is not None:
            clip_grads_with_norm_(parameters, self.max_grad_norm, norm)
        return norm

    def tensors(self) -> dict[str, Tensor | ShardedTensor]:
        """Returns the whole state by name. To restore it, load into these tensors and call `resume`."""
        tensors = {}
        for optimizer in (self.dense, self.fused):
            if optimizer is not None:
                for parameter, state in optimizer.state_dict()["state"].items():
                    kept = {name: value for name, value in state.items() if value is not None}
                    tensors |= {f"{parameter}.{name}": value for name, value in kept.items()}
        if self.scaler is not None:
            tensors["loss_scale"] = self.scaler.tensor()
        return tensors

    def resume(self, steps: int, earlier_batches: int = 0) -> None:
        """Resumes after `steps` steps. Call it before the first batch.

        Args:
            steps: steps of this run.
            earlier_batches: batches of an earlier run that the states of the fused optimizer have seen.
        """
        self.steps = steps
        if self.scaler is not None:
            self.scaler.restore()
        if self.fused is not None:
            # The kernel counts batches for Adam's bias correction and does not save its count.
            self.fused.set_optimizer_step(earlier_batches + steps * self.accumulate_batches)


def dense_optimizer(model: nn.Module, config: pb.DenseOptimizer) -> KeyedOptimizer:
    """Builds the chosen optimizer over all parameters that no fused optimizer trains, keyed by their names.

    Weight decay applies only to matrices, the weights of linear layers. Biases, norms, tables and other
    learned vectors do not decay unless a group of the config says so. The optimizer's state is created here
    and not in the first step, so that every checkpoint has the same tensors.

    Raises:
        ConfigError: a pattern of `config.groups` matches no parameter.
        TypeError: the optimizer's state holds something other than tensors.
    """
    chosen = chosen_dense(config)
    parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = _keyed(chosen, parameters, _groups(model, parameters, config, chosen.weight_decay))
    _make_state(optimizer)
    states = optimizer.state
    for name, parameter in parameters.items():
        state = states.get(parameter, {})
        if "step" in state:
            state["step"].zero_()
        if strangers := [key for key, value in state.items() if not isinstance(value, Tensor | None)]:
            problem = f"its state for {name} has entries that are not tensors: {', '.join(strangers)}"
            raise TypeError(f"{type(chosen).__name__}: {problem}")
    _set_rate(optimizer, chosen.lr)
    return optimizer


def _make_state(optimizer: KeyedOptimizer) -> None:
    """Creates the optimizer's state by a step with zero gradients and rate 0, which changes no weights."""
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        # Some optimizers add weight decay to the gradient, which would end up in their state.
        group["weight_decay"] = 0.0
    optimizer.init_state()
    optimizer.zero_grad()
    for group, decay in zip(optimizer.param_groups, decays, strict=True):
        group["weight_decay"] = decay


def _groups(
    model: nn.Module, parameters: dict[str, nn.Parameter], config: pb.DenseOptimizer, weight_decay: float
) -> list[DenseGroup]:
    """Sorts parameters into the groups of the config, and each group into matrices and other parameters."""
    matrices = {layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)}
    unmatched = {name.removeprefix(MODEL): parameter for name, parameter in parameters.items()}
    names, findings, groups = list(unmatched), [], []
    for place, group in enumerate([*config.groups, pb.ParameterGroup(parameters=["*"])]):
        path = f"train.dense_optimizer.groups[{place}]"
        if place < len(config.groups):
            findings += without_match(group.parameters, names, f"{path}.parameters")
        taken = {name: unmatched.pop(name) for name in list(unmatched) if fits(name, group.parameters)}
        if place < len(config.groups):
            log.info("%s trains %d parameters: %s", path, len(taken), ", ".join(taken))
        for are_matrices in (True, False):
            decay = group.weight_decay if group.HasField("weight_decay") else weight_decay * are_matrices
            sorted_out = [p for p in taken.values() if (p in matrices) == are_matrices]
            if sorted_out:
                groups.append(DenseGroup(sorted_out, are_matrices, decay, group.lr_scale))
    if findings and len(parameters) < len(dict(model.named_parameters())):
        problem = "groups do not apply to sharded tables; see train.sparse_optimizer"
        findings.append(f"train.dense_optimizer.groups: {problem}")
    if findings:
        raise ConfigError(findings)
    return groups


def _keyed(
    chosen: DenseOptimizer, parameters: dict[str, nn.Parameter], groups: list[DenseGroup]
) -> KeyedOptimizer:
    """Builds the optimizers of all groups and combines them into one that is keyed by parameter names."""
    keyed, trained = [], set()
    for optimizer in chosen.build(groups):
        members = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        named = {name: parameter for name, parameter in parameters.items() if parameter in members}
        keyed.append(KeyedOptimizerWrapper(named, lambda _, optimizer=optimizer: optimizer))
        trained |= named.keys()
    if missing := parameters.keys() - trained:
        raise ValueError(f"{type(chosen).__name__} does not train {', '.join(sorted(missing))}")
    return keyed[0] if len(keyed) == 1 else CombinedOptimizer(keyed)


def fused_optimizer(model: nn.Module) -> KeyedOptimizer | None:
    """Returns the optimizer of the sharded tables; None if there are none."""
    if isinstance(model, DistributedModelParallel) and model.fused_optimizer.params:
        return model.fused_optimizer
    return None


def fused_params(config: pb.SparseOptimizer) -> dict[str, Any]:
    """Returns the arguments for a TorchRec sharder that make FBGEMM train tables as configured.

    They are {} if the config sets no optimizer. An id outside its table stops the run; by default FBGEMM
    would warn once and train row 0.
    """
    chosen = chosen_sparse(config)
    if chosen is None:
        return {}
    settings = chosen.fused_params()
    return settings | {
        "optimizer": EmbOptimType(settings["optimizer"]),
        "learning_rate": chosen.lr,
        "bounds_check_mode": BoundsCheckMode.FATAL,
    }


def chosen_dense(config: pb.DenseOptimizer) -> DenseOptimizer:
    """Returns the component that builds the chosen optimizer of dense parameters."""
    chosen = registry.pick(config)
    return chosen.cls(chosen.config)


def chosen_sparse(config: pb.SparseOptimizer) -> SparseOptimizer | None:
    """Returns the chosen optimizer of sharded tables, or None if the config sets none."""
    if fields.chosen(config) is None:
        return None
    chosen = registry.pick(config)
    return chosen.cls(chosen.config)


def _set_rate(optimizer: KeyedOptimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        scaled = rate * group.get("lr_scale", 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(scaled)
        else:
            group["lr"] = scaled


def _call(function: Callable[[], Tensor]) -> Tensor:
    return function()
