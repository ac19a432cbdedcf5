"""Graphs that score with a cache: the model's scores from flat tensors; eager, captured, compiled."""

import json

import pytest
import torch
from torch.fx.experimental import _config as symbolic

from recsys import protos as pb
from recsys.inference.cached_programs import CachedPrograms
from recsys.models import build_model
from recsys.scoring.cached_signature import (
    CachedGraph,
    CacheSpec,
    ExtendGraph,
    PrefillGraph,
    cached_inputs,
    cached_signature,
    extend_inputs,
    extend_signature,
    prefill_signature,
)
from recsys.scoring.flat_events import events_between
from recsys.scoring.prefill import CachedModel
from recsys.scoring.signature import example_inputs, flatten, scoring_signature
from tests.integration.parity import as_tuple
from tests.modules.pipelines import RANKER, RANKERS, batch_of, pipeline_of, random_rows
from tests.scoring.test_prefill import GROWING, HYBRID, INTERLEAVED, PLACED
from tests.scoring.test_signature import (
    BF16,
    RANKER_MMOE,
    RANKER_SASREC,
    SIZES,
    TRUNCATED,
    TWO_CHANNELS,
)
from tests.tools.packaged import assert_packaged

BLIND = "mask { contextual_reads_history: false }"
EXPORTED_HYBRID = f"""model {{ ranker {{ mixer {{ hybrid {{
  mixers {{ hstu {{ num_heads: 2  qk_dim: 4  layer_groups {{ num_layers: 1  tail_len: 5  {BLIND} }} }} }}
  mixers {{ linear {{
    num_heads: 2  qk_dim: 4  num_layers: 1  form: DELTA  time_channel: false  position_channel: false }} }}
  mixers {{ sasrec {{
    num_heads: 2  layer_groups {{ num_layers: 1  tail_len: 3  {BLIND} }}  rotary {{ longest_seconds: 0 }}
  }} }}
}} }} }} }}"""
MODELS = {
    "hstu": (RANKER,),
    "truncated": (RANKER, TRUNCATED),
    "bf16": (RANKER, BF16),
    "sasrec": (RANKER, RANKER_SASREC),
    "hybrid": (RANKER, HYBRID),
    "hybrid that grows": (RANKER, PLACED, EXPORTED_HYBRID),
    "channels that grow": (*GROWING["channels"], INTERLEAVED),
    "contextualized users, growing": GROWING["all encoders"],
    "all encoders": (*RANKERS["all"], TWO_CHANNELS, RANKER_MMOE),
    "channels": RANKERS["channels"],
    "interleaved channels": RANKERS["interleaved channels"],
}


CAPTURED = ("hybrid that grows", "all encoders")
"""To capture takes seconds: these are always tried, the others with --slow. A stack of "all encoders" is
truncated, and `ops/hstu_attention/cached/test_cached_export.py` captures attention with a mask."""

GROWN = [(5, 2), (4, 3), (0, 1), (3, 1), (5, 0), (2, 2)]
"""Sizes of rows of which `run_flat_extended` appends up to two events."""

UNCUT = [(3, 2), (2, 3), (0, 1), (3, 1), (1, 0), (2, 2)]
"""Sizes of rows of which no truncation of "hybrid that grows" cuts anything."""


@pytest.fixture(params=MODELS, scope="module")
def pipeline(request):
    return pipeline_of(*MODELS[request.param])


@pytest.fixture(scope="module")
def model(pipeline):
    torch.manual_seed(3)
    model = build_model(pipeline).eval()
    for name, parameter in model.named_parameters():
        if not name.startswith("embed"):
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def named(pipeline, batch):
    specs = scoring_signature(pipeline)
    return dict(zip([spec.name for spec in specs], flatten(batch), strict=True))


def captured(graph, specs, example):
    """As the exporter does it: every named size dynamic, from 0 on."""
    dims = {name: torch.export.Dim(name, min=0) for spec in specs for name in spec.dims if not name.isdigit()}
    shapes = tuple(
        {axis: dims[name] for axis, name in enumerate(spec.dims) if name in dims} for spec in specs
    )
    with symbolic.patch(backed_size_oblivious=True), torch.no_grad():
        return torch.export.export(graph, example, dynamic_shapes=(shapes,), strict=False)


def graphs_of(model):
    """Graphs in the order of `CachedPrograms`, with the signatures of their inputs."""
    pipeline, form = model.pipeline, CacheSpec.of(model)
    graphs = [(PrefillGraph, prefill_signature(pipeline)), (CachedGraph, cached_signature(pipeline, form))]
    if CachedModel(model).extends:
        graphs.append((ExtendGraph, extend_signature(pipeline, form)))
    return [(graph(model), specs) for graph, specs in graphs]


def programs(model):
    return [
        captured(graph, specs, example_inputs(specs, torch.device("cpu")))
        for graph, specs in graphs_of(model)
    ]


def batches(pipeline):
    return [batch_of(pipeline, random_rows(pipeline, sizes, seed=n)) for n, sizes in enumerate(SIZES)]


def runs_of(graphs):
    return [lambda inputs, graph=graph: as_tuple(graph(*inputs)) for graph in graphs]


def check(pipeline, model, *graphs):
    close = (
        {"rtol": 0.02, "atol": 0.01} if pipeline.model.precision == pb.BF16 else {"rtol": 1e-5, "atol": 1e-5}
    )
    loaded = CachedPrograms(pipeline, CacheSpec.of(model), *runs_of(graphs))
    ways = [loaded.run_flat, loaded.run_flat_extended] if loaded.extends else [loaded.run_flat]
    grown = batch_of(pipeline, random_rows(pipeline, GROWN))
    with torch.no_grad():
        for batch in [*batches(pipeline), grown]:
            for run in ways:
                torch.testing.assert_close(run(flatten(batch)), model.score(batch), **close)


def test_the_graphs_score_as_the_model(pipeline, model, request):
    graphs = [graph for graph, _ in graphs_of(model)]
    assert (len(graphs) == 3) == ("grow" in request.node.callspec.params["pipeline"])
    check(pipeline, model, *graphs)


def test_tensors_are_those_of_the_signatures(pipeline, model):
    form = CacheSpec.of(model)
    assert CacheSpec.from_json(json.loads(json.dumps(form.to_json()))) == form
    for batch in batches(pipeline):
        with torch.no_grad():
            cache = CachedModel(model).prefill(batch)
        signature = cached_signature(pipeline, form)
        sizes = {}
        for spec, tensor in zip(
            signature, cached_inputs(pipeline, form, named(pipeline, batch), cache), strict=True
        ):
            assert tensor.dtype == spec.dtype and tensor.dim() == len(spec.dims), spec.name
            for name, size in zip(spec.dims, tensor.shape, strict=True):
                wanted = int(name) if name.isdigit() else sizes.setdefault(name, size)
                assert size == wanted, spec.name
        assert len({spec.name for spec in signature}) == len(signature)


def test_one_capture_serves_every_size(pipeline, model, request):
    if request.node.callspec.params["pipeline"] not in CAPTURED and not request.config.getoption("--slow"):
        pytest.skip("slow: run with --slow")
    check(pipeline, model, *(program.module() for program in programs(model)))


@pytest.mark.slow
def test_one_package_serves_every_size(pipeline, model, tmp_path):
    loaded = []
    for number, program in enumerate(programs(model)):
        path = str(tmp_path / f"{number}.pt2")
        torch._inductor.aoti_compile_and_package(
            program,
            package_path=path,
            inductor_configs={"aot_inductor.check_lowerbound": False, "shape_padding": False},
        )
        loaded.append(torch._inductor.aoti_load_package(path))

    def contiguous(runner):
        return lambda *inputs: runner(*(item.contiguous() for item in inputs))

    check(pipeline, model, *map(contiguous, loaded))


@pytest.mark.slow
def test_a_package_extends_without_this_code(tmp_path):
    """In a fresh process without recsys, in several threads, for all sizes: what the model computes."""
    pipeline = pipeline_of(*MODELS["hybrid that grows"])
    model, form = build_model(pipeline).eval(), CacheSpec.of(build_model(pipeline))
    graph, specs = graphs_of(model)[2]
    program = captured(graph, specs, example_inputs(specs, torch.device("cpu")))
    prefill = CachedPrograms(pipeline, form, *runs_of([PrefillGraph(model), None]))
    given = []
    with torch.no_grad():
        for added in (0, 1, 2):
            inputs = named(pipeline, batch_of(pipeline, random_rows(pipeline, UNCUT)))
            count = inputs["uih_lengths"]
            split = count - count.clamp(max=added)
            before = events_between(pipeline, inputs, torch.zeros_like(count), split)
            cache = prefill._fill(before)
            later = events_between(pipeline, inputs, split, count)
            given.append(extend_inputs(pipeline, form, later, cache))
        assert_packaged(program, graph, given, tmp_path, atol=1e-5)
