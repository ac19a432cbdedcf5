"""Steps with padded inputs, and recorded ones, against steps that compute each batch as it is."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from recsys import config
from recsys.data.loader import Loader
from recsys.models import build_model, layout_rule
from recsys.training import recorded_step, trainer
from recsys.training.distributed import process_group
from recsys.training.padded_inputs import PaddedInputs
from recsys.training.recorded_step import HostBatch, Recorder, TotalsOfVectors, recorder_for
from recsys.training.session import open_session
from recsys.training.totals import WeightedLoss

QUICKSTART, RETRIEVAL = "configs/quickstart.config", "configs/movielens_small_retrieval.config"
NO_DROPOUT = {
    QUICKSTART: (
        "model.ranker.preprocessor.contextual.dropout=0",
        "model.ranker.mixer.hstu.dropout=0",
    ),
    RETRIEVAL: (
        "model.retriever.preprocessor.uih.dropout=0",
        "model.retriever.mixer.hstu.dropout=0",
    ),
}


def first_batches(pipeline, count):
    loader = Loader.open(pipeline, "train", layout_rule(pipeline), shuffle=True)
    batches = loader.epoch(0)
    return [next(batches) for _ in range(count)]


class Plain(nn.Module):
    """A model's loss of each batch as it is, and in padded inputs."""

    def __init__(self, model, pipeline):
        super().__init__()
        self.model, self.behind, self.weigh = model, TotalsOfVectors(model), WeightedLoss()
        self.padded = Recorder(model, self.behind, pipeline, record=False)

    def forward(self, batch):
        return self.weigh(self.behind(self.model.embed.look_up(batch.ids), batch))


@pytest.mark.parametrize(("path", "looks_up"), [(QUICKSTART, True), (QUICKSTART, False), (RETRIEVAL, True)])
def test_fillers_change_neither_losses_nor_gradients(path, looks_up):
    """Batches of different sizes in the same buffers, the largest one first, so that its rest must go."""
    placement = f"model.embedding.placement={'REPLICATED' if looks_up else 'SHARDED'}"
    few = ["data.num_workers=0", "data.batch_size=16"]
    pipeline = config.prepare(path, [*NO_DROPOUT[path], placement, *few]).pipeline
    torch.manual_seed(3)
    model = build_model(pipeline)
    plain = Plain(model, pipeline)
    assert plain.padded.looks_up == looks_up
    batches = sorted(first_batches(pipeline, 3), key=lambda batch: -batch.layout.total_len)
    for batch in batches:
        results = []
        for totals_of in (plain, plain.padded.totals):
            model.zero_grad()
            totals = totals_of(batch)
            totals.loss.backward()
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            results.append((totals, gradients))
        (wanted, exact), (totals, gradients) = results
        torch.testing.assert_close(totals.losses, wanted.losses, rtol=1e-6, atol=0)
        torch.testing.assert_close(totals.loss, wanted.loss, rtol=1e-6, atol=0)
        tasks = len(totals.names)
        assert torch.equal(totals.sums[tasks:], wanted.sums[tasks:])
        assert gradients.keys() == exact.keys()
        for name, gradient in gradients.items():
            assert (gradient - exact[name]).norm() <= 1e-5 * exact[name].norm()


def test_a_batch_is_at_the_front_of_its_buffers():
    """Also numbers of several dimensions; behind them are zeros, although a larger batch was there before."""
    pipeline = config.prepare(QUICKSTART, ["data.num_workers=0"]).pipeline
    columns = recorded_step.Columns(pipeline, layout_rule(pipeline))
    batches = sorted(first_batches(pipeline, 3), key=lambda batch: -batch.layout.total_len)
    for batch in batches:
        numbers = batch.numbers["uih_duration"]
        batch.numbers["uih_duration"] = torch.stack([numbers, -numbers], dim=1)
        batch.arrays.numbers["uih_duration"] = batch.numbers["uih_duration"].numpy().reshape(-1)
    groups = build_model(pipeline).embed.groups()
    inputs = PaddedInputs(columns, columns.sizes(batches[0]), batches[0], torch.device("cpu"), groups)
    for batch in batches:
        inputs.fill(batch)
        padded, unpadded = inputs.batch(), inputs.unpadded_ids(batch)
        pairs = [(padded.request_time, batch.request_time), (padded.uih_watch_time, batch.uih_watch_time)]
        for name in ("numbers", "labels"):
            assert getattr(padded, name).keys() == getattr(batch, name).keys()
            pairs += [(getattr(padded, name)[key], tensor) for key, tensor in getattr(batch, name).items()]
        pairs += [(padded.ids[key].values(), batch.ids[key].values()) for key in batch.ids.keys()]
        for buffer, tensor in pairs:
            assert torch.equal(buffer[: len(tensor)], tensor)
            assert not buffer[len(tensor) :].any()
        rows = batch.layout.batch_size
        assert torch.equal(padded.uih_lengths[:rows], batch.uih_lengths)
        for key in batch.ids.keys():
            assert torch.equal(unpadded[key].values(), batch.ids[key].values())
            assert torch.equal(unpadded[key].lengths(), batch.ids[key].lengths())
            assert torch.equal(padded.ids[key].lengths()[:rows], batch.ids[key].lengths())
        # A vector that is its own number: each padded vector is that of the id at its place, or that of none.
        numbered = torch.arange(1.0, 1 + len(unpadded.values()))[:, None].expand(-1, 32)
        vectors = inputs.vectors(inputs.place([numbered]))
        for key in unpadded.keys():
            start, ids = unpadded.offset_per_key()[unpadded.keys().index(key)], batch.ids[key].values()
            expected = torch.arange(1.0 + start, 1 + start + len(ids))
            assert torch.equal(vectors[key][: len(ids), 0], expected)
            assert not vectors[key][len(ids) :].any()


def test_a_batch_above_the_limit_is_computed_as_it_is(monkeypatch):
    """Bit by bit, because it is not padded."""
    pipeline = config.prepare(QUICKSTART, [*NO_DROPOUT[QUICKSTART], "data.num_workers=0"]).pipeline
    plain = Plain(build_model(pipeline), pipeline)
    (batch,) = first_batches(pipeline, 1)
    monkeypatch.setattr(recorded_step, "MOST_ENTRIES", batch.layout.total_len * 32 - 1)
    monkeypatch.setattr(recorded_step.PaddedInputs, "fill", None)
    assert torch.equal(plain(batch).losses, plain.padded.totals(HostBatch.of(batch)).losses)


def test_batches_of_an_epoch_have_few_sizes():
    pipeline = config.prepare(QUICKSTART, ["data.num_workers=0"]).pipeline
    columns = recorded_step.Columns(pipeline, layout_rule(pipeline))
    batches = first_batches(pipeline, 60)
    sizes = [columns.sizes(batch) for batch in batches]
    assert len(set(sizes)) <= 4 < len({batch.layout.total_len for batch in batches})
    for batch, chosen in zip(batches, sizes, strict=True):
        counts = dict(chosen.counts)
        assert counts["events"] > batch.uih_timestamps.shape[0]
        assert counts["candidates"] > batch.candidate_timestamps.shape[0]
        assert counts["ids of uih_tag"] > batch.value_counts["uih_tag"].sum()
        assert chosen.max_len >= batch.layout.max_len


@pytest.mark.parametrize(
    ("changes", "world_size", "reason"),
    [
        ((), 1, None),
        ((), 2, "there are several processes"),
        (("train.accumulate_batches=2",), 1, "train.accumulate_batches is more than 1"),
        (("train.cuda_graphs=false",), 1, ""),
        (("data.batch_size=60000",), 1, ""),
    ],
)
def test_what_is_not_recorded_says_why(changes, world_size, reason, caplog):
    """Users who switched graphs off, and users of large models, need no reason."""
    pipeline = config.prepare(QUICKSTART, list(changes)).pipeline
    model = build_model(pipeline)
    with caplog.at_level(logging.INFO, logger=recorded_step.__name__):
        recorder = recorder_for(model, TotalsOfVectors(model), pipeline, torch.device("cuda"), world_size)
    assert (recorder is None) == (reason is not None)
    said = [f"steps are not recorded as CUDA graphs: {reason}"] if reason else []
    assert [record.getMessage() for record in caplog.records] == said
    assert recorder_for(model, TotalsOfVectors(model), pipeline, torch.device("cpu"), 1) is None


@pytest.mark.parametrize(
    ("chosen", "updated"),
    [
        ("model.embedding.placement=SHARDED", "replayed"),
        ("model.embedding.placement=REPLICATED", "replayed"),
        ('model.embedding.tables={table: "tag" placement: REPLICATED}', "called"),
    ],
)
def test_the_update_is_recorded_unless_gradients_come_from_outside_of_the_graph(chosen, updated):
    pipeline = config.prepare(QUICKSTART, [chosen]).pipeline
    model = build_model(pipeline)
    recorder = Recorder(model, TotalsOfVectors(model), pipeline, record=False)
    recorder._replayed = SimpleNamespace(update=lambda function: "replayed", updates=False)
    assert recorder.update(lambda: "called") == updated


def test_a_recorded_update_is_replayed_although_no_others_are_recorded():
    """Its gradients are in the graph alone, so that a function would update nothing."""
    pipeline = config.prepare(QUICKSTART, []).pipeline
    model = build_model(pipeline)
    recorder = Recorder(model, TotalsOfVectors(model), pipeline, record=False)
    results = []
    for recorded in (True, False):
        recorder._records_updates = False
        recorder._replayed = SimpleNamespace(update=lambda function: "replayed", updates=recorded)
        results.append(recorder.update(lambda: "called"))
    assert results == ["replayed", "called"]


def trained(folder, steps, change, **overrides):
    """Weights after some steps of the quickstart, and its recorder, which `change` gets before."""
    chosen = [f"{name}={value}" for name, value in overrides.items()]
    chosen += [f"train.num_steps={steps}", "train.schedule.warmup_steps=0", "data.num_workers=0"]
    pipeline = config.prepare(QUICKSTART, chosen).pipeline
    folder.mkdir(exist_ok=True)
    with process_group() as processes:
        session = open_session(pipeline, folder, processes)
        session.validation = None
        recorder = session.step.recorder
        change(session, recorder)
        trainer.Trainer(session, []).run()
        weights = {name: tensor.clone() for name, tensor in session.model.named_parameters()}
        del session
    return weights, recorder


def do_not_record(session, recorder):
    recorder.record = False


@pytest.mark.gpu
@pytest.mark.parametrize("placement", ["SHARDED", "REPLICATED"])
def test_replays_compute_what_the_steps_they_record_compute(tmp_path, placement):
    """With dropout, whose random numbers continue through replays."""
    chosen = {"model.embedding.placement": placement}
    recorded, recorder = trained(tmp_path / "a", 40, lambda *_: None, **chosen)
    assert recorder.num_graphs > 0
    assert recorder.looks_up == (placement == "REPLICATED")
    assert recorder.record
    wanted, unrecorded = trained(tmp_path / "b", 40, do_not_record, **chosen)
    assert unrecorded.num_graphs == 0
    for name, weight in recorded.items():
        torch.testing.assert_close(weight, wanted[name], rtol=1e-4, atol=1e-6)


def wait(*_):
    torch.ones(1, device="cuda").item()


def ask_the_stream(*_):
    torch.cuda.current_stream().query()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("unrecordable", "reason"), [(wait, "called a synchronizing CUDA operation"), (ask_the_stream, "captur")]
)
def test_a_model_that_cannot_be_recorded_trains_all_the_same(unrecordable, reason, tmp_path, caplog):
    """Found before the recording or in the middle of it."""

    def change(session, recorder):
        session.model.objective.register_forward_pre_hook(unrecordable)

    with caplog.at_level(logging.WARNING, logger=recorded_step.__name__):
        _, recorder = trained(tmp_path, 12, change)
    assert recorder.num_graphs == 0
    (message,) = [x.getMessage() for x in caplog.records if x.name == recorded_step.__name__]
    assert reason in message
    assert torch.cuda.current_stream() == torch.cuda.default_stream()  # not that of the failed recording
