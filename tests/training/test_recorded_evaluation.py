"""Evaluations with padded inputs, and recorded ones, against evaluations of each batch as it is."""

import logging
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch

import recsys
from recsys import config
from recsys.data.loader import Loader
from recsys.models import build_model, layout_rule
from recsys.training import padded_inputs, recorded_step, trainer
from recsys.training.cuda_graphs import GraphMemory
from recsys.training.diagnostics import Diagnostics
from recsys.training.distributed import process_group
from recsys.training.evaluator import evaluate
from recsys.training.recorded_evaluation import EvaluationRecorder, evaluation_recorder_for
from recsys.training.session import open_session
from recsys.training.trainer import step_pipeline
from tests.tools.bundles import movielens_codes

CPU = torch.device("cpu")
QUICKSTART, RETRIEVAL = "configs/quickstart.config", "configs/movielens_small_retrieval.config"
TWO_TOWER = "configs/movielens_small_two_tower.config"
GENERATOR, PARALLEL = "configs/movielens_small_generator.config", "configs/movielens_small_parallel.config"
DELTA = "model.retriever.mixer={linear {num_layers: 1 num_heads: 2 qk_dim: 32 form: DELTA}}"
BFLOAT16 = (
    "model.precision=BF16",
    "model.embedding_dim=64",
    "model.retriever.mixer.hstu.qk_dim=64",
    "model.retriever.mixer.hstu.bias.num_time_buckets=70",
)
CASES = {
    "ranker": (QUICKSTART,),
    "ranker, replicated tables": (QUICKSTART, "model.embedding.placement=REPLICATED"),
    "ranker, mixed tables": (QUICKSTART, 'model.embedding.tables={table: "tag" placement: REPLICATED}'),
    "retriever": (RETRIEVAL,),
    "retriever, sharded table": (RETRIEVAL, "model.embedding.placement=SHARDED", "model.embedding_dim=52"),
    "retriever, seen items kept": (RETRIEVAL, "model.retriever.seen=KEEP"),
    "retriever, linear": (RETRIEVAL, DELTA),
    "retriever, bfloat16": (RETRIEVAL, *BFLOAT16),
    "two towers": (TWO_TOWER,),
    "generator, exact": (GENERATOR,),
    "generator, beams": (GENERATOR, "model.generator.decoding={method: BEAM beam_size: 200}"),
    "parallel codes": (PARALLEL,),
    "hybrid": (PARALLEL, "model.generator.ids={temperature: 0.05}"),
}
"""Models of all families; two towers and the retriever with a sharded table look their catalogue up, too."""
RECORDED = [name for name in CASES if name != "generator, exact"]
ROUNDED_ALIKE = [name for name in RECORDED if name != "retriever, bfloat16"]
SHORT = ("data.eval_batch_size=8", "data.max_history_len=60")
"""Batches that a CPU evaluates fast: each event is compared with the whole catalogue."""


def prepared(folder, name, *changes):
    path, *chosen = CASES[name]
    if path in (GENERATOR, PARALLEL):
        chosen.append(f'model.generator.bundle="{movielens_codes(folder / "bundle")}"')
    return config.prepare(path, [*chosen, "data.num_workers=0", "data.eval_batch_size=24", *changes]).pipeline


def validation(pipeline):
    return Loader.open(pipeline, "validation", layout_rule(pipeline))


@pytest.fixture
def few_fillers(monkeypatch):
    """Rounds counts up to multiples of 64 instead of 512, as suits short batches."""
    monkeypatch.setattr(padded_inputs, "_step", lambda count: max(64, 1 << max(0, count.bit_length() - 3)))


@pytest.mark.usefixtures("few_fillers")
@pytest.mark.parametrize("name", ROUNDED_ALIKE)
def test_fillers_change_neither_losses_nor_rows_of_metrics(name, tmp_path):
    """Batches of different sizes, also in the same buffers. All results are compared in the end, which finds
    those that a later batch has overwritten."""
    pipeline = prepared(tmp_path, name, *SHORT)
    torch.manual_seed(3)
    model = build_model(pipeline).eval()
    padded = EvaluationRecorder(model, pipeline, record=False)
    batches = list(validation(pipeline).first(4))
    batches.append(batches[0])
    results = [padded.results(batch) for batch in batches]
    assert len(padded._inputs) < len(batches)
    for batch, actual in zip(batches, results, strict=True):
        with torch.no_grad():
            outputs = model(batch)
            losses, rows = model.objective(outputs, batch), model.metric_rows(outputs, batch)
        assert torch.equal(actual.losses.counts, losses.counts)
        torch.testing.assert_close(actual.losses.sums, losses.sums, rtol=1e-5, atol=0)
        assert actual.losses.names == losses.names and actual.losses.weights == losses.weights
        assert actual.rows.keys() == rows.keys()
        for task, columns in rows.items():
            for column, expected in zip(actual.rows[task], columns, strict=True):
                torch.testing.assert_close(column, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("few_fillers")
@pytest.mark.parametrize("name", ["ranker", "retriever", "two towers", "hybrid"])
def test_metrics_of_padded_batches(name, tmp_path):
    pipeline = prepared(tmp_path, name, *SHORT, "data.eval_batch_size=24")
    torch.manual_seed(3)
    model, loader = build_model(pipeline), validation(pipeline)
    expected = evaluate(model, loader, CPU, max_batches=4)
    recorder = EvaluationRecorder(model, pipeline, record=False)
    actual = evaluate(model, loader, CPU, max_batches=4, recorder=recorder)
    assert recorder._inputs
    assert actual == pytest.approx(expected, rel=1e-5)


def trained(folder, *, padded):
    """Weights after some steps of the quickstart with evaluations of their average between, the metrics of
    these, and the next random numbers."""
    chosen = ["data.num_workers=0", "data.batch_size=16", "data.eval_batch_size=24", "train.num_steps=6"]
    chosen += ["train.evaluation={every_steps: 2 max_batches: 2}", "train.weight_averaging={ema {}}"]
    pipeline = config.prepare(QUICKSTART, chosen).pipeline
    folder.mkdir()

    class Metrics(trainer.Hook):
        def __init__(self):
            self.records = []

        def evaluated(self, record):
            self.records.append(record.metrics)

    with process_group() as processes:
        session, hook = open_session(pipeline, folder, processes), Metrics()
        if padded:
            session.evaluation_recorder = EvaluationRecorder(session.model, pipeline, record=False)
        trainer.Trainer(session, [hook]).run()
        weights = {name: tensor.clone() for name, tensor in session.model.named_parameters()}
        if padded:
            assert session.evaluation_recorder._inputs
        del session
    return weights, hook.records, torch.rand(3)


def test_training_does_not_depend_on_how_it_is_evaluated(tmp_path):
    weights, metrics, numbers = trained(tmp_path / "padded", padded=True)
    expected, unpadded, then = trained(tmp_path / "unpadded", padded=False)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())
    assert torch.equal(numbers, then)
    assert len(metrics) == len(unpadded) == 3
    for values, wanted in zip(metrics, unpadded, strict=True):
        assert values == pytest.approx(wanted, rel=1e-5, nan_ok=True)
    # The last evaluation is diagnosed, so not padded.
    assert metrics[-1] == pytest.approx(unpadded[-1], rel=0, abs=0, nan_ok=True)


@pytest.mark.parametrize("diagnosed", [True, False])
def test_evaluations_that_cannot_be_recorded_are_computed_as_they_are(diagnosed):
    """After a recording has failed, and with diagnostics."""
    pipeline = config.prepare(QUICKSTART, ["data.num_workers=0", "data.eval_batch_size=24"]).pipeline
    model, loader = build_model(pipeline), validation(pipeline)
    recorder = EvaluationRecorder(model, pipeline, record=False)
    recorder.failed, recorder.results = not diagnosed, None
    diagnostics = Diagnostics(model, CPU) if diagnosed else None
    actual = evaluate(model, loader, CPU, 1, diagnostics, recorder)
    assert actual == pytest.approx(evaluate(model, loader, CPU, 1), rel=0, abs=0, nan_ok=True)


def test_an_evaluation_from_python_makes_its_recorder(monkeypatch):
    """An evaluation of a training gets that of its run instead, which says once why there is none."""
    rows = pq.read_table("tests/data/kuairand/validation.parquet").slice(0, 48)
    model = recsys.build(recsys.config(QUICKSTART, ["data.num_workers=0", "data.eval_batch_size=24"]))
    expected = recsys.evaluate(model, rows)
    made = []

    def make(*arguments):
        assert evaluation_recorder_for(*arguments) is None, "the model is on a CPU"
        made.append(EvaluationRecorder(*arguments[:2], record=False))
        return made[0]

    monkeypatch.setattr("recsys.api.fitting.evaluation_recorder_for", make)
    assert recsys.evaluate(model, rows) == pytest.approx(expected, rel=1e-5, nan_ok=True)
    assert len(made) == 1 and made[0]._inputs


@pytest.mark.parametrize(
    ("name", "changes", "world_size", "reason"),
    [
        ("ranker", (), 1, None),
        ("ranker", ("train.accumulate_batches=2",), 1, None),
        ("two towers", (), 1, None),  # they sample negatives, but not in evaluation
        ("generator, beams", (), 1, None),
        ("generator, exact", (), 1, "the host reads numbers of this model from the GPU"),
        ("ranker", (), 2, "there are several processes"),
        ("ranker", ("train.cuda_graphs=false",), 1, ""),
        ("ranker", ("data.eval_batch_size=60000",), 1, ""),
    ],
)
def test_what_is_not_recorded_says_why(name, changes, world_size, reason, tmp_path, caplog):
    pipeline = prepared(tmp_path, name, *changes)
    model, memory = build_model(pipeline), GraphMemory()
    with caplog.at_level(logging.INFO, logger=recorded_step.__name__):
        recorder = evaluation_recorder_for(model, pipeline, torch.device("cuda"), world_size, memory)
    assert (recorder is None) == (reason is not None)
    assert recorder is None or recorder.memory is memory
    said = [f"evaluation is not recorded as CUDA graphs: {reason}"] if reason else []
    assert [record.getMessage() for record in caplog.records] == said
    assert evaluation_recorder_for(model, pipeline, CPU, 1) is None


EAGER = SimpleNamespace(failed=True)
"""Stands in for a recorder whose recording has failed."""


def loss(session, recorder):
    """The loss of a recorded evaluation, whose metrics are those of the same padded batches without graphs,
    and whose losses are also those of batches as they are."""
    model, rows, device = session.model, session.validation, session.processes.device
    padded = EvaluationRecorder(model, session.pipeline, record=False)
    recorded, unrecorded, eager = (
        evaluate(model, rows, device, 4, recorder=chosen) for chosen in (recorder, padded, EAGER)
    )
    assert recorded == pytest.approx(unrecorded, rel=1e-3, nan_ok=True)
    for metric in (name for name in eager if name.startswith("loss")):
        assert recorded[metric] == pytest.approx(unrecorded[metric], rel=1e-5)
        assert recorded[metric] == pytest.approx(eager[metric], rel=1e-3)
    return recorded["loss"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", RECORDED)
def test_replays_evaluate_the_weights_of_the_moment(name, tmp_path):
    """Also the average that takes their place. Recorded steps between evaluations share their memory."""
    pipeline = prepared(tmp_path, name, "train.num_steps=8", "train.weight_averaging={ema {}}")
    with process_group() as processes:
        session = open_session(pipeline, tmp_path, processes)
        recorder, steps, batches = session.evaluation_recorder, step_pipeline(session), session.batches()

        # In the second one, each size occurs for the second time.
        at_start = [loss(session, recorder) for _ in range(3)]
        assert at_start[1:] == pytest.approx(at_start[:1] * 2, rel=1e-5)
        num_graphs = recorder.num_graphs
        for _ in range(6):
            steps.progress(batches)
            session.moved()
        trained = loss(session, recorder)
        with session.as_evaluated():
            averaged = loss(session, recorder)
        assert len({at_start[-1], trained, averaged}) == 3
        assert loss(session, recorder) == pytest.approx(trained, rel=1e-5)
        anew = evaluation_recorder_for(session.model, pipeline, processes.device, 1)
        alone = evaluate(session.model, session.validation, processes.device, 4, recorder=anew)
        assert alone["loss"] == pytest.approx(trained, rel=1e-5)
        assert recorder.num_graphs == num_graphs > 0
        assert not recorder.failed
        del session, steps, batches


@pytest.mark.gpu
def test_a_model_whose_metrics_wait_is_evaluated_all_the_same(tmp_path, caplog):
    pipeline = prepared(tmp_path, "generator, exact")
    model, loader = build_model(pipeline).cuda(), validation(pipeline)
    recorder = EvaluationRecorder(model, pipeline)
    with caplog.at_level(logging.WARNING, logger=recorded_step.__name__):
        metrics = [
            evaluate(model, loader, torch.device("cuda"), 4, recorder=chosen)
            for chosen in (recorder, recorder, EAGER)
        ]
    assert recorder.failed and recorder.num_graphs == 0
    (message,) = [x.getMessage() for x in caplog.records if x.name == recorded_step.__name__]
    assert message.startswith("evaluation is not recorded as CUDA graphs, which would be faster: ")
    assert metrics[0]["loss"] == pytest.approx(metrics[2]["loss"], rel=1e-4)
    assert metrics[1] == pytest.approx(metrics[2], rel=1e-5)
