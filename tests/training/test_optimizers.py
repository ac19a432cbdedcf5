"""Both optimizers against their formulas: decay, clipping, accumulation, and the rates that kernels see."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingCollection, KeyedJaggedTensor
from torchrec.modules.embedding_configs import EmbeddingConfig

from recsys import protos as pb
from recsys.modules.norm import HeadNorm, LayerNorm
from recsys.training.distributed import Processes
from recsys.training.optimizers import ScheduledOptimizer, dense_optimizer, fused_params
from recsys.training.sharding import plan_tables, shard


class Small(nn.Module):
    """A parameter of every sort that models have."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.layer_norm, self.head_norm = LayerNorm(3), HeadNorm(3, 1)
        self.positions = nn.Embedding(5, 3)
        self.bias_table = nn.Parameter(torch.ones(2, 4))
        self.tables = EmbeddingCollection([EmbeddingConfig(name="item", num_embeddings=4, embedding_dim=3)])


def train(**fields) -> pb.Train:
    fields.setdefault("schedule", pb.Schedule(constant=pb.ConstantDecay()))
    fields.setdefault("dense_optimizer", pb.DenseOptimizer(adamw=pb.AdamW(lr=0.1)))
    return pb.Train(**fields)


def adamw(weight: Tensor, gradients: list[Tensor], rates: list[float], decay: float = 0.0) -> Tensor:
    """The formula of arXiv 1711.05101 with the usual constants, in float64."""
    w = weight.detach().double()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        g = g.double()
        w = w * (1 - rate * decay)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w = w - rate * (m / (1 - 0.9**t)) / (torch.sqrt(v / (1 - 0.999**t)) + 1e-8)
    return w.float()


def step(optimizer: ScheduledOptimizer, parameter: nn.Parameter, gradient: Tensor) -> None:
    """One batch whose gradient is `gradient`."""
    optimizer.zero_grad()
    (parameter * gradient).sum().backward()
    optimizer.step()


def test_only_matrices_of_linear_layers_are_decayed():
    model = Small()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    config = pb.DenseOptimizer(adamw=pb.AdamW(lr=0.1, weight_decay=0.5))
    optimizer = dense_optimizer(model, config)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), f"{name} moved when the state was made"
        assert parameter.grad is None
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"linear.weight"}
    torch.testing.assert_close(model.linear.weight, before["linear.weight"] * 0.95)


@pytest.mark.parametrize("recorded", [False, True])
def test_adamw_with_decay_over_a_schedule(recorded):
    """The update that a graph would hold reads the learning rate from a tensor."""
    model = nn.Linear(2, 2, bias=False)
    start = model.weight.detach().clone()
    config = train(
        dense_optimizer=pb.DenseOptimizer(adamw=pb.AdamW(lr=0.1, weight_decay=0.2)),
        schedule=pb.Schedule(warmup_steps=2, linear=pb.LinearDecay(final_factor=0.5)),
    )
    optimizer = ScheduledOptimizer(model, config, total_steps=4)
    if recorded:
        optimizer.record(lambda update: update())
    gradients, rates = [torch.randn(2, 2) for _ in range(4)], []
    for gradient in gradients:
        step(optimizer, model.weight, gradient)
        rates.append(float(optimizer.dense.param_groups[0]["lr"]))
    assert isinstance(optimizer.dense.param_groups[0]["lr"], torch.Tensor) == recorded
    assert rates == pytest.approx([0.05, 0.1, 0.1 * 5 / 6, 0.1 * 4 / 6])
    torch.testing.assert_close(model.weight, adamw(start, gradients, rates, decay=0.2))
    assert optimizer.steps == 4


def test_the_norm_over_all_dense_gradients_is_clipped():
    model = nn.ModuleDict({"a": nn.Linear(1, 1, bias=False), "b": nn.Linear(1, 1, bias=False)})
    optimizer = ScheduledOptimizer(model, train(max_grad_norm=1.0), total_steps=9)
    a, b = model["a"].weight, model["b"].weight
    for scale, clipped in ((1.0, [0.6, 0.8]), (0.1, [0.3, 0.4])):
        optimizer.zero_grad()
        (a * 3 * scale + b * 4 * scale).sum().backward()
        optimizer.step()
        assert optimizer.last_grad_norm.item() == pytest.approx(5 * scale)
        assert [a.grad.item(), b.grad.item()] == pytest.approx(clipped, rel=1e-5)


def test_without_a_limit_gradients_stay_but_the_norm_is_known():
    model = nn.Linear(2, 1, bias=False)
    optimizer = ScheduledOptimizer(model, train(), total_steps=9)
    assert optimizer.last_grad_norm is None
    step(optimizer, model.weight, torch.tensor([[300.0, 400.0]]))
    assert optimizer.last_grad_norm.item() == 500
    assert model.weight.grad.tolist() == [[300.0, 400.0]]


def test_accumulated_batches_are_one_step_along_their_mean():
    model = nn.Linear(2, 2, bias=False)
    start = model.weight.detach().clone()
    optimizer = ScheduledOptimizer(model, train(accumulate_batches=3), total_steps=2)
    gradients = [torch.randn(2, 2) for _ in range(6)]
    for index, gradient in enumerate(gradients):
        step(optimizer, model.weight, gradient)
        assert (optimizer.steps, optimizer.accumulated) == divmod(index + 1, 3)
        if index < 2:
            assert torch.equal(model.weight, start)
    means = [sum(gradients[:3]) / 3, sum(gradients[3:]) / 3]
    torch.testing.assert_close(model.weight, adamw(start, means, [0.1, 0.1]))
    torch.testing.assert_close(optimizer.last_grad_norm, means[1].norm())


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit():
    config = train(schedule=pb.Schedule(warmup_steps=3, cosine=pb.CosineDecay()), max_grad_norm=0.5)
    gradients = [torch.randn(3, 3) for _ in range(8)]
    whole, saved = nn.Linear(3, 3, bias=False), {}
    optimizer = ScheduledOptimizer(whole, config, total_steps=8)
    for index, gradient in enumerate(gradients):
        if index == 4:
            saved = {name: value.clone() for name, value in optimizer.tensors().items()}
            weight = whole.weight.detach().clone()
        step(optimizer, whole.weight, gradient)

    resumed = nn.Linear(3, 3, bias=False)
    resumed.weight.data.copy_(weight)
    again = ScheduledOptimizer(resumed, config, total_steps=8)
    assert (
        again.tensors().keys() == saved.keys() == {f"weight.{x}" for x in ("step", "exp_avg", "exp_avg_sq")}
    )
    for name, value in again.tensors().items():
        value.copy_(saved[name])
    again.resume(4)
    for gradient in gradients[4:]:
        step(again, resumed.weight, gradient)
    assert torch.equal(resumed.weight, whole.weight)


def test_fused_params_name_every_setting():
    adagrad = fused_params(pb.SparseOptimizer(row_wise_adagrad=pb.RowWiseAdagrad(lr=0.3, eps=1e-5)))
    assert (adagrad["optimizer"].value, adagrad["learning_rate"], adagrad["eps"]) == (
        "exact_row_wise_adagrad",
        0.3,
        1e-5,
    )
    adam = fused_params(pb.SparseOptimizer(adam=pb.SparseAdam(lr=0.2, beta1=0.8, beta2=0.9, eps=1e-6)))
    assert adam["optimizer"].value == "adam"
    assert [adam[key] for key in ("learning_rate", "beta1", "beta2", "eps")] == [0.2, 0.8, 0.9, 1e-6]
    assert adagrad["bounds_check_mode"].name == adam["bounds_check_mode"].name == "FATAL"
    rowwise = fused_params(
        pb.SparseOptimizer(
            partial_row_wise_adam=pb.PartialRowWiseAdam(lr=0.2, beta1=0.7, beta2=0.8, eps=1e-6)
        )
    )
    assert rowwise["optimizer"].value == "partial_row_wise_adam"
    assert [rowwise[key] for key in ("learning_rate", "beta1", "beta2", "eps")] == [0.2, 0.7, 0.8, 1e-6]
    assert fused_params(pb.SparseOptimizer()) == {}


class Looked(nn.Module):
    """A sharded table and a dense scale."""

    def __init__(self):
        super().__init__()
        config = EmbeddingConfig(name="item", num_embeddings=4, embedding_dim=4, feature_names=["item"])
        self.tables = EmbeddingCollection([config])
        self.scale = nn.Linear(4, 4, bias=False)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        return self.scale(self.tables(ids)["item"].values())


def lookup(*ids: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_lengths_sync(["item"], torch.tensor(ids), torch.tensor([len(ids)]))


def table(model: nn.Module) -> Tensor:
    """A copy of the whole table; one process holds all of it."""
    (weight,) = (value for name, value in model.state_dict().items() if "tables" in name)
    return weight.local_shards()[0].tensor.detach().clone()


@pytest.fixture
def sharded():
    """Wraps models for a process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    row_wise = pb.SparseOptimizer(row_wise_adagrad=pb.RowWiseAdagrad(lr=0.5, eps=1e-3))

    def wrap(config: pb.Train, steps: int, optimizer: pb.SparseOptimizer = row_wise):
        config.sparse_optimizer.CopyFrom(optimizer)
        processes = Processes(0, 1, torch.device("cpu"))
        looked, pipeline = Looked(), pb.Pipeline(train=config)
        model = shard(looked, pipeline, processes, plan_tables(looked, pipeline, processes))
        return model, ScheduledOptimizer(model, config, total_steps=steps)

    yield wrap
    gc.collect()
    dist.destroy_process_group()


def row_wise_adagrad(weight: Tensor, sums: Tensor, gradient: Tensor, rate: float) -> None:
    """In place: one accumulator a row takes the mean of squares."""
    sums += gradient.square().mean(1)
    touched = gradient.abs().sum(1) > 0
    weight[touched] -= rate * gradient[touched] / (sums[touched].sqrt() + 1e-3)[:, None]


def test_the_kernel_follows_the_schedule(sharded):
    """Row-wise Adagrad by its formula, with the scheduled rate of every step and with summed repeated ids."""
    schedule = pb.Schedule(warmup_steps=3, linear=pb.LinearDecay())
    model, optimizer = sharded(train(schedule=schedule), 6)
    expected, sums = table(model), torch.zeros(4)
    for rate in (0.5 / 3, 1.0 / 3, 0.5, 0.375, 0.25, 0.125):
        assert optimizer.learning_rates() == pytest.approx({"dense": 0.2 * rate, "sparse": rate})
        ids, upstream = [1, 3, 1], torch.randn(3, 4)
        gradient = torch.zeros(4, 4).index_add_(
            0, torch.tensor(ids), upstream @ model.module.scale.weight.detach()
        )
        optimizer.zero_grad()
        model(lookup(*ids)).backward(upstream)
        optimizer.step()
        row_wise_adagrad(expected, sums, gradient, rate)
        torch.testing.assert_close(table(model), expected)
    (momentum,) = (value for name, value in optimizer.tensors().items() if "momentum1" in name)
    torch.testing.assert_close(momentum.local_shards()[0].tensor.flatten(), sums)


def train_table(model, optimizer, steps: list[tuple[list[int], Tensor]]) -> list[Tensor]:
    """Trains on ids and the gradients of their rows; returns the gradient of the whole table in each step."""
    gradients = []
    for ids, upstream in steps:
        weight = model.module.scale.weight.detach()
        gradients.append(torch.zeros(4, 4).index_add_(0, torch.tensor(ids), upstream @ weight))
        optimizer.zero_grad()
        model(lookup(*ids)).backward(upstream)
        optimizer.step()
    return gradients


SPARSE = {
    "sgd": (pb.SparseOptimizer(sgd=pb.SparseSgd(lr=0.5)), torch.optim.SGD, {}),
    "adagrad": (
        pb.SparseOptimizer(adagrad=pb.SparseAdagrad(lr=0.5, eps=1e-3)),
        torch.optim.Adagrad,
        {"eps": 1e-3},
    ),
}


@pytest.mark.parametrize("name", SPARSE)
def test_a_table_moves_as_by_torch_and_its_state_survives_a_stop(sharded, name):
    """These two leave rows without a gradient alone, so torch's optimizer of the whole table is the same."""
    config, reference, settings = SPARSE[name]
    schedule = pb.Schedule(step=pb.StepDecay(every_steps=2, factor=0.5))
    steps = [([1, 3, 1], torch.randn(3, 4)) for _ in range(3)] + [([0, 3], torch.randn(2, 4))]
    model, optimizer = sharded(train(schedule=schedule), 4, config)
    expected = nn.Parameter(table(model))
    by_torch = reference([expected], lr=0.5, **settings)
    gradients = train_table(model, optimizer, steps[:3])
    saved = {key: value for key, value in optimizer.tensors().items() if "tables" in key}
    assert len(saved) == (name == "adagrad")

    again, goes_on = sharded(train(schedule=schedule), 4, config)
    for fresh, old in zip(again.state_dict().values(), model.state_dict().values(), strict=True):
        copy_tensor(fresh, old)
    for key, value in goes_on.tensors().items():
        copy_tensor(value, optimizer.tensors()[key])
    goes_on.resume(3)
    gradients += train_table(model, optimizer, steps[3:])
    train_table(again, goes_on, steps[3:])
    assert torch.equal(table(again), table(model))

    for rate, gradient in zip((0.5, 0.5, 0.25, 0.25), gradients, strict=True):
        by_torch.param_groups[0]["lr"], expected.grad = rate, gradient
        by_torch.step()
    torch.testing.assert_close(table(model), expected.detach())


@pytest.mark.gpu
@pytest.mark.parametrize("row_wise", [False, True])
def test_adam_of_a_table_by_its_formula(row_wise):
    """In float64: only rows with a gradient move, and t counts batches; FBGEMM has it on CUDA only."""
    settings = {"lr": 0.1, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6}
    config = train()
    if row_wise:
        config.sparse_optimizer.partial_row_wise_adam.CopyFrom(pb.PartialRowWiseAdam(**settings))
    else:
        config.sparse_optimizer.adam.CopyFrom(pb.SparseAdam(**settings))
    device = torch.device("cuda", 0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        looked, pipeline, processes = Looked(), pb.Pipeline(train=config), Processes(0, 1, device)
        model = shard(looked, pipeline, processes, plan_tables(looked, pipeline, processes))
        optimizer = ScheduledOptimizer(model, config, total_steps=3)
        expected = table(model).cpu().double()
        m, v = torch.zeros(4, 4).double(), torch.zeros(4, 1 if row_wise else 4).double()
        for t, ids in enumerate(([1, 3, 1], [0, 3], [1]), start=1):
            upstream = torch.randn(len(ids), 4)
            weight = model.module.scale.weight.detach().cpu()
            gradient = torch.zeros(4, 4).index_add_(0, torch.tensor(ids), upstream @ weight).double()
            optimizer.zero_grad()
            model(lookup(*ids).to(device)).backward(upstream.to(device))
            optimizer.step()
            square = gradient.square().mean(1, keepdim=True) if row_wise else gradient.square()
            for row in set(ids):
                m[row] = 0.8 * m[row] + 0.2 * gradient[row]
                v[row] = 0.9 * v[row] + 0.1 * square[row]
                scale = torch.sqrt(v[row] / (1 - 0.9**t)) + 1e-6
                expected[row] -= 0.1 * m[row] / (1 - 0.8**t) / scale
            torch.testing.assert_close(table(model).cpu(), expected.float(), rtol=1e-4, atol=1e-5)
    finally:
        model = optimizer = None
        gc.collect()
        dist.destroy_process_group()


def copy_tensor(to: Tensor, source: Tensor) -> None:
    pairs = [(to, source)] if isinstance(to, Tensor) and not hasattr(to, "local_shards") else []
    if not pairs:
        pairs = [(a.tensor, b.tensor) for a, b in zip(to.local_shards(), source.local_shards(), strict=True)]
    for target, value in pairs:
        target.detach().copy_(value)


def test_sharded_tables_are_not_dense_and_move_with_every_batch(sharded):
    model, optimizer = sharded(train(accumulate_batches=2), 2)
    assert list(optimizer.dense.params) == ["scale.weight"]
    before, scale = table(model), model.module.scale.weight.detach().clone()
    optimizer.zero_grad()
    model(lookup(2)).sum().backward()
    optimizer.step()
    assert not torch.equal(table(model)[2], before[2]) and torch.equal(table(model)[:2], before[:2])
    assert torch.equal(model.module.scale.weight, scale) and optimizer.accumulated == 1


def test_a_table_s_state_is_saved_beside_the_dense_one(sharded):
    model, optimizer = sharded(train(), 2)
    assert sum("momentum1" in name for name in optimizer.tensors()) == 1
    assert sum("exp_avg_sq" in name for name in optimizer.tensors()) == 1


def test_sharded_tables_need_an_optimizer(sharded):
    model, _ = sharded(train(), 2)
    with pytest.raises(ValueError, match="tables are sharded, but train.sparse_optimizer is not set"):
        ScheduledOptimizer(model, train(), 2)


def test_an_id_outside_its_table_stops_the_run(sharded):
    model, _ = sharded(train(), 2)
    with pytest.raises(RuntimeError, match="idx < num_rows"):
        model(lookup(1, 7))


def test_resuming_tells_the_kernel_its_count(sharded):
    model, optimizer = sharded(train(accumulate_batches=3), 9)
    optimizer.resume(4)
    ((_, collection),) = optimizer.fused.optimizers
    assert [kernel._emb_module.iter.item() for _, kernel in collection.optimizers] == [12]
    assert optimizer.steps == 4
