"""Prefill and scoring graphs: the model's scores from flat tensors; eager, captured, compiled, any size."""

import json

import pytest
import torch
from torch.fx.experimental import _config as symbolic

from recsys import protos as pb
from recsys.inference.cached_programs import example_inputs
from recsys.models import build_model
from recsys.scoring.cached_signature import (
    CachedGraph,
    CacheSpec,
    PrefillGraph,
    cached_inputs,
    cached_signature,
    prefill_signature,
)
from recsys.scoring.prefill import CachedModel
from recsys.scoring.signature import flatten, scoring_signature
from tests.modules.pipelines import RANKER, RANKERS, batch_of, pipeline_of, random_rows
from tests.scoring.test_prefill import HYBRID
from tests.scoring.test_signature import BF16, ONE_LAYER, RANKER_SASREC, SIZES, TRUNCATED

EXPORTED_HYBRID = """model { ranker { mixer { hybrid {
  mixers { linear { num_heads: 2  qk_dim: 4  num_layers: 1 } }
  mixers { hstu { num_heads: 2  qk_dim: 4  layer_groups { num_layers: 1  tail_len: 3 } } } } } } }"""
MODELS = {
    "hstu": (RANKER,),
    "truncated": (RANKER, TRUNCATED),
    "bf16": (RANKER, BF16),
    "sasrec": (RANKER, RANKER_SASREC),
    "hybrid": (RANKER, HYBRID),
    "hybrid to be exported": (RANKER, EXPORTED_HYBRID),
    "all encoders": (*RANKERS["all"], ONE_LAYER),
    "channels": RANKERS["channels"],
    "interleaved channels": RANKERS["interleaved channels"],
}


CAPTURED = ("hybrid to be exported", "all encoders", "interleaved channels")
"""To capture takes seconds: these are always tried, the others with --slow. A stack of the channels is
truncated, and `ops/hstu_attention/cached/test_cached_export.py` captures attention with a mask."""


@pytest.fixture(params=MODELS, scope="module")
def pipeline(request):
    return pipeline_of(*MODELS[request.param])


@pytest.fixture(scope="module")
def model(pipeline):
    torch.manual_seed(3)
    return build_model(pipeline).eval()


def named(pipeline, batch):
    specs = scoring_signature(pipeline)
    return dict(zip([spec.name for spec in specs], flatten(batch), strict=True))


def prefill_inputs(pipeline, batch):
    inputs = named(pipeline, batch)
    return tuple(inputs[spec.name] for spec in prefill_signature(pipeline))


def captured(graph, specs, example):
    """As the exporter does it: every named size dynamic, from 0 on."""
    dims = {name: torch.export.Dim(name, min=0) for spec in specs for name in spec.dims if not name.isdigit()}
    shapes = tuple(
        {axis: dims[name] for axis, name in enumerate(spec.dims) if name in dims} for spec in specs
    )
    with symbolic.patch(backed_size_oblivious=True), torch.no_grad():
        return torch.export.export(graph, example, dynamic_shapes=(shapes,), strict=False)


def programs(model):
    if model.pipeline == pipeline_of(*MODELS["hybrid"]):
        pytest.skip("the loop of linear attention cannot be captured behind a truncation")
    form = CacheSpec.of(model)
    signatures = prefill_signature(model.pipeline), cached_signature(model.pipeline, form)
    return [
        captured(graph(model), specs, example_inputs(specs, torch.device("cpu")))
        for graph, specs in zip((PrefillGraph, CachedGraph), signatures, strict=True)
    ]


def batches(pipeline):
    return [batch_of(pipeline, random_rows(pipeline, sizes, seed=n)) for n, sizes in enumerate(SIZES)]


def check(pipeline, model, prefill, score):
    form = CacheSpec.of(model)
    close = (
        {"rtol": 0.02, "atol": 0.01} if pipeline.model.precision == pb.BF16 else {"rtol": 1e-5, "atol": 1e-5}
    )
    with torch.no_grad():
        for batch in batches(pipeline):
            tensors = prefill(*prefill_inputs(pipeline, batch))
            cache = form.cache(
                {spec.name: tensor for spec, tensor in zip(form.specs(), tensors, strict=True)}
            )
            scores = score(*cached_inputs(pipeline, form, named(pipeline, batch), cache))
            torch.testing.assert_close(scores, model.score(batch), **close)


def test_the_graphs_score_as_the_model(pipeline, model):
    check(pipeline, model, PrefillGraph(model), CachedGraph(model))


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
    prefill, score = programs(model)
    check(pipeline, model, prefill.module(), score.module())


@pytest.mark.slow
def test_one_package_serves_every_size(pipeline, model, tmp_path):
    loaded = []
    for number, program in enumerate(programs(model)):
        path = str(tmp_path / f"{number}.pt2")
        torch._inductor.aoti_compile_and_package(
            program, package_path=path, inductor_configs={"aot_inductor.check_lowerbound": False}
        )
        loaded.append(torch._inductor.aoti_load_package(path))

    def contiguous(runner):
        return lambda *inputs: runner(*(item.contiguous() for item in inputs))

    check(pipeline, model, *map(contiguous, loaded))
