"""Scaled losses change nothing but the range of gradients; overflows skip steps and are survived."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from recsys import config
from recsys.config import features
from recsys.data.batch import Batch
from recsys.errors import NonFiniteLossError
from recsys.training.distributed import process_group
from recsys.training.loss_scaling import MAX_SKIPPED, LossScaler
from recsys.training.session import Session, open_session
from tests.integration.runs import records, tensors, train

CONFIG = "tests/integration/tiny.config"
TABLE = "model.embed.tables.dim_16.embeddings.item_id_table.weight"
FP16 = ("model.precision=FP16", "train.evaluation.every_steps=99")


class Run:
    """A session with its first batches, trained step by step."""

    def __init__(self, folder: Path, processes, *overrides: str):
        pipeline = config.prepare(CONFIG, ["model.ranker.mixer.hstu.dropout=0", *overrides]).pipeline
        folder.mkdir(exist_ok=True)
        self.session: Session = open_session(pipeline, folder, processes)
        stream = self.session.batches()
        self.batches: list[Batch] = [next(stream) for _ in range(3)]
        stream.close()
        self.session.wrapped.eval()  # no dropout

    def step(self, number: int) -> None:
        self.session.optimizer.zero_grad()
        loss, _ = self.session.wrapped(self.batches[number % len(self.batches)])
        loss.backward()
        self.session.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        state = self.session.wrapped.state_dict() | self.session.optimizer.tensors()
        parts = {n: x.local_shards()[0].tensor if hasattr(x, "local_shards") else x for n, x in state.items()}
        return {name: part.detach().clone() for name, part in parts.items()}


@pytest.fixture
def processes():
    with process_group() as processes:
        yield processes


def test_a_scale_changes_no_bit_of_a_float32_run(tmp_path, processes):
    """The scale is a power of two, so products with it are exact."""
    plain, scaled = Run(tmp_path / "plain", processes), Run(tmp_path / "scaled", processes)
    step, scaler = scaled.session.step, LossScaler(processes.device)
    tables = features.tables(scaled.session.pipeline)
    scaler.watch(step.sum_over_ranks)
    step.totals_of_vectors.transform = scaler.dividing(name for table in tables for name in table.columns)
    scaled.session.optimizer.scaler = scaler
    before = plain.weights()
    for number in range(3):
        plain.step(number)
        scaled.step(number)
    expected, actual = plain.weights(), scaled.weights()
    assert actual.pop("loss_scale").tolist() == [65536, 3, 0, 0]
    assert expected.keys() == actual.keys()
    assert not torch.equal(expected[TABLE], before[TABLE])
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def spoil(module: nn.Module, times: int) -> None:
    """Makes the gradients of a module's output infinite in its first `times` backward passes."""
    left = [times]

    def double(_module, _inputs, output):
        first = next(iter(output.values())) if isinstance(output, dict) else output
        if first.requires_grad:
            first.register_hook(infinite)

    def infinite(gradient: Tensor) -> Tensor:
        left[0] -= 1
        return gradient * torch.inf if left[0] >= 0 else gradient

    module.register_forward_hook(double)


@pytest.mark.parametrize("where", ["head", "embed"])
def test_a_step_whose_gradients_overflow_is_skipped_and_counted(tmp_path, processes, caplog, where):
    run = Run(tmp_path, processes, *FP16)
    spoil(getattr(run.session.model, where), 2)
    before = run.weights()
    assert before.pop("loss_scale").tolist() == [65536, 0, 0, 0]
    run.step(0)
    run.step(1)
    after = run.weights()
    assert after.pop("loss_scale").tolist() == [16384, 0, 2, 2]
    assert all(torch.equal(before[name], after[name]) for name in before)
    said = [record.message for record in caplog.records if record.name.startswith("recsys.training.loss")]
    assert [line.split(",")[0] for line in said] == [
        "step 1: gradients overflow float16 at a loss scale of 65536",
        "step 2: gradients overflow float16 at a loss scale of 32768",
    ]
    assert run.session.optimizer.last_grad_norm is None
    run.step(2)
    after = run.weights()
    assert after.pop("loss_scale").tolist() == [16384, 1, 2, 0]
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert TABLE in moved
    assert any(name.startswith("model.head.") for name in moved)
    assert torch.isfinite(run.session.optimizer.last_grad_norm)


def test_too_many_skipped_steps_in_a_row_end_the_run(tmp_path, processes):
    run = Run(tmp_path, processes, *FP16)
    spoil(run.session.model.head, 1000)
    with pytest.raises(NonFiniteLossError, match=rf"^step {MAX_SKIPPED}: gradients overflowed float16 in 25"):
        for number in range(100):
            run.step(number)


def test_a_resumed_fp16_run_is_that_of_an_uninterrupted_one(tmp_path):
    overrides = (*FP16, "train.num_steps=4", "train.checkpoint.every_steps=2", "train.schedule={constant {}}")
    assert train(tmp_path / "whole", *overrides) == 0
    assert train(tmp_path / "parts", *overrides, "train.num_steps=2") == 0
    assert train(tmp_path / "parts", *overrides) == 0
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    whole, parts = (tensors(tmp_path / name / "checkpoints" / "step-00000004") for name in ("whole", "parts"))
    assert whole["optimizer.loss_scale"].tolist() == [65536, 4, 0, 0]
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
