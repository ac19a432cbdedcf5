"""Graphs with padded inputs score as those with the inputs; on a GPU, replayed in any order."""

from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch

from recsys import environment
from recsys import protos as pb
from recsys.inference.compiler import compile_graph
from recsys.inference.eager import EagerPackage
from recsys.inference.program import Program
from recsys.models import build_model
from recsys.scoring import recorded as recorded_module
from recsys.scoring.cached_signature import CachedGraph, CacheSpec, cached_inputs
from recsys.scoring.padded_inputs import PaddedInputs, padded_cached_inputs
from recsys.scoring.prefill import CachedModel, keeps_cache
from recsys.scoring.recorded import RecordedScoring, as_tuple
from recsys.scoring.signature import (
    CANDIDATES,
    EVENTS,
    ROWS,
    ScoringGraph,
    example_inputs,
    inputs_of,
    scoring_signature,
)
from recsys.scoring.user_candidate_split import UserCandidateSplit
from tests.modules.pipelines import (
    CHANNELS,
    RANKER,
    RANKERS,
    RETRIEVER,
    batch_of,
    generator_pipeline,
    pipeline_of,
    random_rows,
)
from tests.scoring.test_prefill import HYBRID, LINEAR, build
from tests.scoring.test_signature import RANKER_SASREC

CODES = np.array([[n % 3, n % 4] for n in range(20)])
LENGTHS = [[3], [0], [6, 0, 2, 1], [1, 2], [0, 0, 0], list(range(7)) * 3, [6] * 9]
SCORED = {
    "hstu": (RANKER,),
    "sasrec": (RANKER, RANKER_SASREC),
    "hybrid, truncated": (RANKER, HYBRID),
    "all encoders, channels, truncated": (*RANKERS["all"], CHANNELS),
    "retriever": (RETRIEVER,),
}
WIDE = "model { embedding_dim: 128  ranker { mixer { hstu { num_heads: 2  qk_dim: 64  v_dim: 64 } } } }"
ON_GPU = {
    **SCORED,
    "linear": (RANKER, LINEAR),
    "hstu with kernels in 16 bits": (
        RANKER.replace("bias { num_time_buckets: 40 }", ""),
        WIDE,
        "model { precision: BF16 }",
    ),
}
CALLS = [[(3, 2)], [(0, 1)], [(0, 3), (0, 0)], [(6, 4)] * 9, [(5, 90)] * 4, [(5, 90), (1, 2), (0, 4)]]
"""Events and candidates of the rows of calls, of which some are padded to the same sizes."""
IN_TURN = [[(3, 2)], [(6, 1), (0, 2), (2, 0), (1, 4)], [(2, 4)]]
"""Sizes A, B and A."""


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


@pytest.fixture
def stand_ins(monkeypatch):
    """On a CPU, graphs that compute again what they have recorded; yields the calls of all models."""
    calls = []
    for graph in (ScoringGraph, CachedGraph):

        def forward(self, *inputs, original=graph.forward):
            outputs = original(self, *inputs)
            calls.append((partial(original, self), inputs, as_tuple(outputs)))
            return outputs

        monkeypatch.setattr(graph, "forward", forward)

    class Again:
        def replay(self):
            compute, inputs, outputs = self.recorded
            for old, new in zip(outputs, as_tuple(compute(*inputs)), strict=True):
                old.copy_(new)

    @contextmanager
    def record(again, pool):
        yield
        again.recorded = calls[-1]

    monkeypatch.setattr(recorded_module, "recording", record)
    functions = {"CUDAGraph": Again, "graph_pool_handle": tuple}
    streams = dict.fromkeys(("current_stream", "default_stream"), lambda device: 0)
    for name, stand_in in (functions | streams).items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    with torch.no_grad():
        yield calls


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


def assert_close(answer, expected, close=1e-5):
    torch.testing.assert_close(answer.cpu(), expected.float().cpu(), rtol=close, atol=close)


def error(answer, expected):
    """The largest error, of an expected answer above 1 its share."""
    expected = expected.float()
    return ((answer.float() - expected).abs() / expected.abs().clamp(min=1)).max().item()


def recording_of(model, device="cpu"):
    padded = PaddedInputs(model.pipeline, scoring_signature(model.pipeline))
    return RecordedScoring(ScoringGraph(model), padded, torch.device(device), "the search")


def batches_for(model, calls):
    return [batch_of(model.pipeline, random_rows(model.pipeline, n, seed)) for seed, n in enumerate(calls)]


def cached_inputs_for(model, batch):
    pipeline, names = model.pipeline, [spec.name for spec in scoring_signature(model.pipeline)]
    named = dict(zip(names, inputs_of(batch, pipeline), strict=True))
    return cached_inputs(pipeline, CacheSpec.of(model), named, CachedModel(model).prefill(batch))


def check_padding(padding, graph, calls, answers):
    """Every call in the buffers of its sizes, which earlier calls have filled."""
    buffers = {}
    for inputs, expected in zip(calls, answers, strict=True):
        sizes = padding.sizes(inputs)
        if sizes not in buffers:
            buffers[sizes] = padding.buffers(sizes, torch.device("cpu"))
        buffers[sizes].fill(inputs)
        for output, right in zip(as_tuple(graph(*buffers[sizes].tensors)), as_tuple(expected), strict=True):
            torch.testing.assert_close(output[: len(right)], right, rtol=1e-5, atol=1e-5)
        yield (
            dict(sizes.dims),
            dict(zip([spec.name for spec in padding.specs], buffers[sizes].tensors, strict=True)),
        )
    assert len(buffers) < len(calls)


@torch.no_grad()
def test_rows_that_fill_up_the_sizes_change_no_search(model):
    graph, padding = ScoringGraph(model), PaddedInputs(model.pipeline, scoring_signature(model.pipeline))
    calls = [inputs_for(model, lengths, seed) for seed, lengths in enumerate(LENGTHS)]
    checks = check_padding(padding, graph, calls, [graph(*inputs) for inputs in calls])
    for lengths, (size, named) in zip(LENGTHS, checks, strict=True):
        assert len(named["uih_lengths"]) == size[ROWS] > len(lengths)
        assert named["uih_lengths"].sum() == size[EVENTS] and named["seen_lengths"].sum() == size["seen"]
        assert named["uih_lengths"].max() <= model.pipeline.data.max_history_len
    for first, second in (([5, 6], [6, 1]), ([3], [0]), ([6] * 9, [6] * 10)):
        assert padding.sizes(inputs_for(model, first)) == padding.sizes(inputs_for(model, second))


@pytest.mark.parametrize("form", SCORED)
@torch.no_grad()
def test_rows_that_fill_up_the_sizes_change_no_score(form):
    """In one pass and with a cache; the oracle is the model on each batch as it is."""
    model = build(pipeline_of(*SCORED[form]))
    batches = batches_for(model, CALLS * 2)
    answers = [model.score(batch) for batch in batches]
    padding = PaddedInputs(model.pipeline, scoring_signature(model.pipeline))
    calls = [inputs_of(batch, model.pipeline) for batch in batches]
    for size, named in check_padding(padding, ScoringGraph(model), calls, answers):
        assert named["uih_lengths"].sum() == size[EVENTS]
        assert named["uih_lengths"].max() <= model.pipeline.data.max_history_len
        if CANDIDATES in size:
            assert named["num_candidates"].sum() == size[CANDIDATES]
        for name in named:
            if f"{name}.counts" in named:
                assert named[f"{name}.counts"].sum() == len(named[name])
    assert keeps_cache(model) == (form != "retriever")
    if keeps_cache(model):
        padding = padded_cached_inputs(model.pipeline, CacheSpec.of(model))
        calls = [cached_inputs_for(model, batch) for batch in batches]
        assert len(list(check_padding(padding, CachedGraph(model), calls, answers))) == len(calls)


@pytest.mark.parametrize("tokens", [1, 60, 3000])
def test_no_row_is_longer_than_the_bound(tokens):
    """Neither the longest row nor the fillers, which have all that is added."""
    pipeline = pipeline_of(RANKER, f"data {{ max_history_len: {max(tokens, 6)} }}")
    padding, rule = PaddedInputs(pipeline, scoring_signature(pipeline)), 2  # gender and age are two tokens
    for calls in ([(tokens, 1)], [(tokens, 300)] * 3, [(0, 2)], [(1, 1)] * 520):
        inputs = inputs_of(batch_of(pipeline, random_rows(pipeline, calls)), pipeline)
        sizes = padding.sizes(inputs)
        buffers = padding.buffers(sizes, torch.device("cpu"))
        buffers.fill(inputs)
        named = dict(zip([spec.name for spec in padding.specs], buffers.tensors, strict=True))
        longest = (rule + named["uih_lengths"] + named["num_candidates"]).max()
        assert longest <= len(named["steps"]) + 2 and named["uih_lengths"].max() <= max(tokens, 6)
        assert dict(sizes.dims)[EVENTS] <= max(64, 1.26 * sum(n for n, _ in calls))


def test_copies_of_inputs_and_outputs_are_right_in_any_order(model, stand_ins):
    recorded, given = recording_of(model), in_turn(model)
    answers = [recorded(*inputs) for inputs in given]
    assert recorded.num_graphs == 2 and len(stand_ins) == 2 + 2 * 2
    for answer, inputs in zip(answers, given, strict=True):
        assert_same(answer, ScoringGraph(model)(*inputs))


def answers_of(package, batch):
    """Scores in one pass and, if the model can, with a cache."""
    answers = [package.run(batch)]
    if package.keeps_cache:
        split = UserCandidateSplit(package.pipeline)
        cache = package.prefill(split.users(batch))
        candidates = split.candidate_range(batch, 0, batch.num_candidates.tolist())
        answers.append(package.score(candidates, cache))
    return answers


@pytest.mark.parametrize("form", ["hstu", "hybrid, truncated", "retriever"])
def test_a_model_replays_in_any_order(form, stand_ins):
    model = build(pipeline_of(*SCORED[form]))
    package = EagerPackage(model)
    package._record(model)
    for batch in batches_for(model, IN_TURN * 3):
        for answer in answers_of(package, batch):
            assert_close(answer, model.score(batch))
    recordings = [package._run] + ([package._score] if package.keeps_cache else [])
    assert [recorded.num_graphs for recorded in recordings] == [2] * len(recordings)


def scored_as_the_model():
    """Records a small HSTU ranker, checks its scores of batches, each size twice, and returns its package."""
    model = build(pipeline_of(*SCORED["hstu"]))
    package = EagerPackage(model)
    package._record(model)
    for batch in batches_for(model, IN_TURN * 2):
        for answer in answers_of(package, batch):
            assert_close(answer, model.score(batch))
    return package


@pytest.mark.parametrize(("limit", "num_graphs"), [("MOST_ENTRIES", 0), ("MOST_GRAPHS", 1)])
def test_calls_beyond_the_limits_run_as_they_are(limit, num_graphs, stand_ins, monkeypatch):
    monkeypatch.setattr(recorded_module, limit, 1)
    package = scored_as_the_model()
    assert package._run.num_graphs == package._score.num_graphs == num_graphs


def test_what_cannot_be_recorded_runs_as_it_is_and_is_logged_once(stand_ins, monkeypatch, caplog):
    @contextmanager
    def record(graph, pool):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")
        yield

    monkeypatch.setattr(recorded_module, "recording", record)
    scored_as_the_model()
    reasons = [record.getMessage() for record in caplog.records]
    assert [reason.partition(" is not")[0] for reason in reasons] == [
        "scoring in one pass",
        "scoring with a cache",
    ]
    assert all(
        reason.endswith("faster: operation not permitted when stream is capturing") for reason in reasons
    )


@pytest.mark.gpu
def test_replays_in_any_order_find_what_the_model_finds(model):
    """In the default stream and in another one."""
    given = in_turn(model)
    with torch.no_grad():
        expected = [ScoringGraph(model)(*inputs) for inputs in given]
        recorded = recording_of(model.cuda(), "cuda")
        answers = [recorded(*inputs) for inputs in given]
        assert recorded.num_graphs == 2
        with torch.cuda.stream(torch.cuda.Stream()):
            answers += [recorded(*inputs) for inputs in given]
            torch.cuda.synchronize()
    for answer, of_model in zip(answers, expected * 2, strict=True):
        assert_same(answer, of_model)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ON_GPU)
def test_replays_in_any_order_score_as_the_model(form):
    """A truncation reads a number of tokens back from the device, so one pass with it is not recorded."""
    model = build(pipeline_of(*ON_GPU[form])).cuda()
    package, batches = EagerPackage(model), batches_for(model, IN_TURN * 3)
    close = 2e-2 if model.pipeline.model.precision == pb.BF16 else 1e-4
    with torch.no_grad():
        for batch in batches:
            for answer in answers_of(package, batch):
                assert_close(answer, model.score(batch.to("cuda")), close)
    assert package._run.num_graphs == (0 if "truncated" in form else 2)
    assert package._score is None or package._score.num_graphs == 2


@pytest.mark.gpu
def test_a_search_that_cannot_be_recorded_runs_as_it_is(model, caplog):
    graph, waits = ScoringGraph(model.cuda()), []

    def run(*inputs):
        waits.append(inputs[0].sum().item())
        return graph(*inputs)

    padded = PaddedInputs(model.pipeline, scoring_signature(model.pipeline))
    recorded = RecordedScoring(run, padded, torch.device("cuda"), "the search")
    inputs = inputs_for(model, [3, 4])
    with torch.no_grad():
        expected = graph(*(tensor.cuda() for tensor in inputs))
        for _ in range(3):
            assert_same(recorded(*inputs), expected)
    assert recorded.num_graphs == 0 and "not recorded" in caplog.text
    torch.rand(3, device="cuda")  # the generator of random numbers is not left in a recording
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


@pytest.mark.gpu
def test_a_model_on_a_gpu_replays_its_searches(model):
    rows = random_rows(model.pipeline, [(5, 0), (2, 0)])
    batch, package = batch_of(model.pipeline, rows), EagerPackage(model.cuda())
    answers = [package.find(batch) for _ in range(3)]
    assert package._run.num_graphs == 1
    for answer in answers[1:]:
        assert_same((answer.scores, answer.items), (answers[0].scores, answers[0].items))


def compiled(graph, specs, example, path, pipeline):
    """A recordable program, compiled for the GPU."""
    compile_graph(graph, specs, example, path, pipeline)
    return Program(path, specs, torch.device("cuda"), recordable=True)


@pytest.mark.gpu
@pytest.mark.slow
def test_a_package_on_a_gpu_is_recorded_too(model, tmp_path):
    """Compiled ahead of time, which takes a minute."""
    if environment.find_cxx() is None:
        pytest.skip("there is no C++ compiler")
    padded = PaddedInputs(model.pipeline, scoring_signature(model.pipeline))
    graph, example = ScoringGraph(model.cuda()).eval(), example_inputs(padded.specs, torch.device("cuda"))
    program = compiled(graph, padded.specs, example, tmp_path / "model.pt2", model.pipeline)
    recorded = RecordedScoring(lambda *inputs: program(inputs), padded, torch.device("cuda"), "the search")
    given = in_turn(model)
    for inputs in given:
        with torch.no_grad():
            expected = graph(*(tensor.cuda() for tensor in inputs))
        assert_same(recorded(*inputs), expected)
        assert_same(program(inputs), expected)
    assert recorded.num_graphs == 2


@pytest.mark.gpu
@pytest.mark.slow
def test_a_package_that_scores_with_a_cache_is_recorded_too(tmp_path):
    """Compiled ahead of time, which takes a minute; off from float32 by at most twice as much as eager mode.

    Both round to 16 bits, at different places, so neither is right about the other.
    """
    if environment.find_cxx() is None:
        pytest.skip("there is no C++ compiler")
    forms = ON_GPU["hstu with kernels in 16 bits"]
    model, exact = build(pipeline_of(*forms)).cuda(), build(pipeline_of(*forms[:-1])).cuda()
    pipeline, batches = model.pipeline, [batch.to("cuda") for batch in batches_for(model, IN_TURN * 3)]
    cases = [
        (ScoringGraph, PaddedInputs(pipeline, scoring_signature(pipeline)), lambda b: inputs_of(b, pipeline)),
        (
            CachedGraph,
            padded_cached_inputs(pipeline, CacheSpec.of(model)),
            lambda b: cached_inputs_for(model, b),
        ),
    ]
    with torch.no_grad():
        expected = [exact.score(batch) for batch in batches]
        allowed = 2 * max(map(error, map(model.score, batches), expected))
        assert allowed < 0.15
        for graph, padded, inputs in cases:
            path = tmp_path / f"{graph.__name__}.pt2"
            example = example_inputs(padded.specs, torch.device("cuda"))
            program = compiled(graph(model).eval(), padded.specs, example, path, pipeline)
            recorded = RecordedScoring(partial(called, program), padded, torch.device("cuda"), path.name)
            errors = [
                error(*recorded(*inputs(batch)), right)
                for batch, right in zip(batches, expected, strict=True)
            ]
            print(f"{graph.__name__}: largest error {max(errors):.4f}, allowed {allowed:.4f}")
            assert max(errors) <= allowed
            assert recorded.num_graphs == 2


def called(program, *inputs):
    return program(inputs)
