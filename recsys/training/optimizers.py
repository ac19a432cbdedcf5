"""Optimizers of a run: AdamW for all dense weights, FBGEMM's fused optimizers for sharded tables.

A fused optimizer updates the looked-up rows inside the backward pass; all that is left to do outside is to
tell it the learning rate. `ScheduledOptimizer` puts both behind the two calls that TorchRec's pipelines
make for every batch, `zero_grad` and `step`.
"""

from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardedTensor
from torchrec.optim.keyed import KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from recsys import protos as pb
from recsys.training.schedules import factor


class ScheduledOptimizer:
    """Both optimizers of a run, with schedule, gradient clipping and accumulation.

    Dense gradients of `train.accumulate_batches` batches are averaged into one step. Sharded tables move with
    every batch: their gradients are never kept. Gradients are means over ranks already, so every rank clips
    by the same norm.

    Args:
        model: a model whose sharded tables, if any, are in a `DistributedModelParallel`.
        train: resolved.
        total_steps: steps of the whole run, for the schedule.

    Raises:
        ValueError: there are sharded tables and no optimizer for them.

    Attributes:
        steps: steps done.
        accumulated: batches since the last step; 0 is where the state may be saved.
        last_grad_norm: norm of the dense gradients of the last step before clipping, a scalar on the device,
            for which reading it waits; None before the first step.
    """

    def __init__(self, model: nn.Module, train: pb.Train, total_steps: int):
        self.dense = dense_optimizer(model, train.dense_optimizer)
        self.fused = fused_optimizer(model)
        self.peaks = {"dense": train.dense_optimizer.adamw.lr}
        if self.fused is not None:
            kind = train.sparse_optimizer.WhichOneof("optimizer")
            if kind is None:
                # Otherwise FBGEMM would train by SGD with its own learning rate.
                raise ValueError("tables are sharded, but train.sparse_optimizer is not set")
            self.peaks["sparse"] = getattr(train.sparse_optimizer, kind).lr
        self.schedule = train.schedule
        self.total_steps = total_steps
        self.accumulate_batches = train.accumulate_batches
        self.max_grad_norm = train.max_grad_norm if train.HasField("max_grad_norm") else None
        self.steps = 0
        self.accumulated = 0
        self.last_grad_norm: Tensor | None = None

    def learning_rates(self) -> dict[str, float]:
        """Learning rates of the next or current step: `dense`, and `sparse` if there are sharded tables."""
        now = factor(self.steps, self.schedule, self.total_steps)
        return {name: peak * now for name, peak in self.peaks.items()}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Call before the forward pass of each batch, whose backward pass updates sharded tables."""
        if self.accumulated:
            return
        rates = self.learning_rates()
        self.dense.zero_grad(set_to_none)
        _set_rate(self.dense, rates["dense"])
        if self.fused is not None:
            _set_rate(self.fused, rates["sparse"])
            # This hands the learning rate to the kernels; there are no gradients to clear.
            self.fused.zero_grad()

    def step(self) -> None:
        """Call after the backward pass of each batch; the last batch of a step updates the dense weights."""
        self.accumulated += 1
        if self.accumulated < self.accumulate_batches:
            return
        parameters = [p for p in self.dense.params.values() if p.grad is not None]
        gradients = [p.grad for p in parameters]
        if self.accumulate_batches > 1:
            for gradient in gradients:
                gradient.div_(self.accumulate_batches)
        self.last_grad_norm = get_total_norm(gradients)
        if self.max_grad_norm is not None:
            clip_grads_with_norm_(parameters, self.max_grad_norm, self.last_grad_norm)
        self.dense.step()
        self.accumulated = 0
        self.steps += 1

    def tensors(self) -> dict[str, Tensor | ShardedTensor]:
        """The whole state, by name; loading in place into these tensors and calling `resume` restores it."""
        tensors = {}
        for optimizer in (self.dense, self.fused):
            if optimizer is not None:
                for parameter, state in optimizer.state_dict()["state"].items():
                    tensors |= {f"{parameter}.{name}": value for name, value in state.items()}
        return tensors

    def resume(self, steps: int) -> None:
        """Resumes after `steps` steps. Call it before the first batch."""
        self.steps = steps
        if self.fused is not None:
            # Adam's bias correction counts batches in the kernel, which does not save its count.
            self.fused.set_optimizer_step(steps * self.accumulate_batches)


def dense_optimizer(model: nn.Module, config: pb.DenseOptimizer) -> KeyedOptimizer:
    """AdamW over all parameters that no fused optimizer trains, keyed by their names in `model`.

    Weight decay shrinks matrices, the weights of linear layers: not biases, norms, tables or other learned
    vectors. Its state is made here and not in the first step, so that every checkpoint has the same
    tensors.
    """
    adamw = config.adamw
    matrices = {layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)}
    parameters = dict(in_backward_optimizer_filter(model.named_parameters()))

    def build(params: dict[str, nn.Parameter]) -> torch.optim.AdamW:
        groups = [
            {"params": [p for p in params.values() if p in matrices], "weight_decay": adamw.weight_decay},
            {"params": [p for p in params.values() if p not in matrices], "weight_decay": 0.0},
        ]
        betas = (adamw.beta1, adamw.beta2)
        return torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=0.0, betas=betas, eps=adamw.eps, fused=True
        )

    optimizer = KeyedOptimizerWrapper(parameters, build, pass_params_dict=True)
    optimizer.init_state()  # a step along zero gradients at rate 0: weights stay as they are
    optimizer.zero_grad()
    for state in optimizer.state.values():
        state["step"].zero_()
    _set_rate(optimizer, adamw.lr)
    return optimizer


def fused_optimizer(model: nn.Module) -> KeyedOptimizer | None:
    """The optimizer of the sharded tables; None if there are none."""
    if isinstance(model, DistributedModelParallel) and model.fused_optimizer.params:
        return model.fused_optimizer
    return None


def fused_params(config: pb.SparseOptimizer) -> dict[str, Any]:
    """Arguments of a TorchRec sharder that make FBGEMM train tables as configured; {} if nothing is set.

    An id outside its table stops the run; by default FBGEMM would warn once and train row 0.
    """
    kind = config.WhichOneof("optimizer")
    if kind is None:
        return {}
    chosen = getattr(config, kind)
    common = {
        "learning_rate": chosen.lr,
        "eps": chosen.eps,
        "bounds_check_mode": BoundsCheckMode.FATAL,
    }
    if kind == "adam":
        betas = {"beta1": chosen.beta1, "beta2": chosen.beta2}
        return {"optimizer": EmbOptimType.ADAM, **common, **betas}
    return {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, **common}


def _set_rate(optimizer: KeyedOptimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
