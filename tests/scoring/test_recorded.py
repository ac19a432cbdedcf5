"""Searches with padded inputs find what searches with the inputs find; on a GPU, replayed in any order."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from recsys import environment
from recsys import protos as pb
from recsys.inference.compiler import compile_graph
from recsys.inference.eager import EagerPackage
from recsys.inference.program import Program
from recsys.models import build_model
from recsys.scoring.recorded import PaddedInputs, RecordedScoring
from recsys.scoring.signature import EVENTS, ROWS, ScoringGraph, inputs_of, scoring_signature
from tests.modules.pipelines import batch_of, generator_pipeline, random_rows

CODES = np.array([[n % 3, n % 4] for n in range(20)])
LENGTHS = [[3], [0], [6, 0, 2, 1], [1, 2], [0, 0, 0], list(range(7)) * 3, [6] * 9]


@pytest.fixture(params=["states", "codes"])
def model(request, tmp_path):
    """A generator that finds 5 items by a beam, from the state of a history or from all of its codes."""
    pipeline = generator_pipeline(tmp_path, CODES)
    generator = pipeline.model.generator
    generator.decoding.method, generator.decoding.beam_size = pb.Decoding.BEAM, 5
    pipeline.predict.top_k = 5
    del generator.metrics[:]
    if request.param == "codes":
        generator.ClearField("preprocessor")
        generator.ClearField("mixer")
        shape = {"num_heads": 2, "head_dim": 3, "ff_dim": 8}
        generator.encoder.CopyFrom(pb.CodeEncoder(**shape))
        generator.decoder.CopyFrom(pb.CodeDecoder(**shape))
    torch.manual_seed(0)
    built = build_model(pipeline).eval()
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return built


def inputs_for(model, lengths, seed=0):
    rows = random_rows(model.pipeline, [(n, 0) for n in lengths], seed)
    return inputs_of(batch_of(model.pipeline, rows), model.pipeline)


def in_turn(model):
    """Inputs of the sizes A, B, A, three times, with other numbers each time."""
    return [inputs_for(model, n, seed) for seed in range(3) for n in ([3], [6, 0, 2, 1], [2])]


def assert_same(answer, expected):
    (scores, items), (right_scores, right_items) = ([t.cpu() for t in pair] for pair in (answer, expected))
    assert torch.equal(items, right_items)
    torch.testing.assert_close(scores, right_scores, rtol=1e-5, atol=1e-5)


def test_rows_that_fill_up_the_sizes_change_nothing(model):
    graph, padding = ScoringGraph(model), PaddedInputs(model.pipeline)
    assert padding.obstacle == ""
    for seed, lengths in enumerate(LENGTHS):
        inputs = inputs_for(model, lengths, seed)
        chosen = padding.sizes(inputs)
        padded = padding.pad(inputs, chosen)
        dims = padding.dims(padded)
        assert dims[ROWS] == chosen.rows > len(lengths) and dims[EVENTS] == chosen.events
        named = {spec.name: tensor for spec, tensor in zip(padding.specs, padded, strict=True)}
        assert named["uih_lengths"].sum() == chosen.events and named["seen_lengths"].sum() == chosen.seen
        assert named["uih_lengths"].max() <= model.pipeline.data.max_history_len
        with torch.no_grad():
            outputs = graph(*padded)
            assert_same([output[: len(lengths)] for output in outputs], graph(*inputs))
    for first, second in (([5, 6], [6, 1]), ([3], [0]), ([6] * 9, [6] * 10)):
        assert padding.sizes(inputs_for(model, first)) == padding.sizes(inputs_for(model, second))


def test_copies_of_inputs_and_outputs_are_right_in_any_order(model, monkeypatch):
    """On a CPU, with graphs that compute again what they have recorded."""
    graph, calls = ScoringGraph(model), []

    def run(*inputs):
        calls.append((inputs, graph(*inputs)))
        return calls[-1][1]

    class Again:
        def replay(self):
            for old, new in zip(self.outputs, graph(*self.inputs), strict=True):
                old.copy_(new)

    @contextmanager
    def record(again, **_):
        yield
        again.inputs, again.outputs = calls[-1]

    stand_ins = {"CUDAGraph": Again, "graph": record, "graph_pool_handle": tuple}
    streams = dict.fromkeys(("current_stream", "default_stream"), lambda device: 0)
    for name, stand_in in (stand_ins | streams).items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    recorded = RecordedScoring(run, model.pipeline, torch.device("cpu"))
    with torch.no_grad():
        given = in_turn(model)
        answers = [recorded(*inputs) for inputs in given]
        assert recorded.num_graphs == 2 and len(calls) == 2 + 2 * 2
        for answer, inputs in zip(answers, given, strict=True):
            assert_same(answer, graph(*inputs))


@pytest.mark.gpu
def test_replays_in_any_order_find_what_the_model_finds(model):
    """In the default stream and in another one."""
    given = in_turn(model)
    with torch.no_grad():
        expected = [ScoringGraph(model)(*inputs) for inputs in given]
        cuda = model.cuda()
        recorded = RecordedScoring(ScoringGraph(cuda), cuda.pipeline, torch.device("cuda"))
        answers = [recorded(*inputs) for inputs in given]
        assert recorded.num_graphs == 2
        with torch.cuda.stream(torch.cuda.Stream()):
            answers += [recorded(*inputs) for inputs in given]
            torch.cuda.synchronize()
    for answer, of_model in zip(answers, expected * 2, strict=True):
        assert_same(answer, of_model)


@pytest.mark.gpu
def test_a_search_that_cannot_be_recorded_runs_as_it_is(model, caplog):
    graph, waits = ScoringGraph(model.cuda()), []

    def run(*inputs):
        waits.append(inputs[0].sum().item())
        return graph(*inputs)

    recorded = RecordedScoring(run, model.pipeline, torch.device("cuda"))
    inputs = inputs_for(model, [3, 4])
    with torch.no_grad():
        expected = graph(*(tensor.cuda() for tensor in inputs))
        for _ in range(3):
            assert_same(recorded(*inputs), expected)
    assert recorded.num_graphs == 0 and "not recorded" in caplog.text
    torch.rand(3, device="cuda")  # the generator of random numbers is not left in a recording


@pytest.mark.gpu
def test_a_model_on_a_gpu_replays_its_searches(model):
    rows = random_rows(model.pipeline, [(5, 0), (2, 0)])
    batch, package = batch_of(model.pipeline, rows), EagerPackage(model.cuda())
    answers = [package.find(batch) for _ in range(3)]
    assert package._find.num_graphs == 1
    for answer in answers[1:]:
        assert_same((answer.scores, answer.items), (answers[0].scores, answers[0].items))


@pytest.mark.gpu
@pytest.mark.slow
def test_a_package_on_a_gpu_is_recorded_too(model, tmp_path):
    """Compiled ahead of time, which takes a minute."""
    if environment.find_cxx() is None:
        pytest.skip("there is no C++ compiler")
    device, specs = torch.device("cuda"), scoring_signature(model.pipeline)
    graph, example = ScoringGraph(model.cuda()).eval(), inputs_for(model, [3, 4, 1])
    on_device = tuple(tensor.to(device) for tensor in example)
    compile_graph(graph, specs, on_device, tmp_path / "model.pt2", model.pipeline)
    program = Program(tmp_path / "model.pt2", specs, device, recordable=True)
    recorded = RecordedScoring(lambda *inputs: program(inputs), model.pipeline, device)
    given = in_turn(model)
    for inputs in given:
        with torch.no_grad():
            expected = graph(*(tensor.to(device) for tensor in inputs))
        assert_same(recorded(*inputs), expected)
        assert_same(program(inputs), expected)
    assert recorded.num_graphs == 2
