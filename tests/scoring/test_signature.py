"""The scoring graph: the same scores from flat tensors, eager, captured and compiled, at every size."""

import dataclasses

import pytest
import torch
from torch.fx.experimental import _config as symbolic

from recsys import protos as pb
from recsys.models import build_model
from recsys.models.signature import TensorSpec
from recsys.scoring.signature import ScoringGraph, flatten, scoring_signature
from tests.modules.pipelines import RANKER, RANKERS, RETRIEVER, batch_of, pipeline_of, random_rows

RANKER_SASREC = "model { ranker { mixer { sasrec { num_layers: 1  num_heads: 2 } } } }"
RETRIEVER_SASREC = "model { retriever { mixer { sasrec { num_layers: 1  num_heads: 2 } } } }"
ONE_LAYER = "model { ranker { mixer { hstu { num_layers: 1 } } } }"
LINEAR = "linear { num_layers: 1  num_heads: 2  qk_dim: 4 }"
RANKER_LINEAR = f"""model {{ ranker {{ mixer {{ hybrid {{
  mixers {{ sasrec {{ num_heads: 2  rotary {{}}  layer_groups {{ num_layers: 1  tail_len: 3 }} }} }}
  mixers {{ {LINEAR} }}
}} }} }} }}"""
RETRIEVER_LINEAR = """model { retriever { mixer { linear {
  num_layers: 1  num_heads: 2  qk_dim: 4  form: DELTA  position_channel: false
} } } }"""
RETRIEVER_HYBRID = """model { retriever { mixer { hybrid {
  mixers { hstu {
    num_layers: 1  num_heads: 2  qk_dim: 4  v_dim: 3  scale_len: 3  activation: UVQK  gate: UGN
    bias { num_time_buckets: 40 }
  } }
  mixers { sasrec { num_layers: 1  num_heads: 2  rotary {} } }
} } } }"""
TRUNCATED = """model { ranker {
  preprocessor { contextual { action_placement: INTERLEAVED } }
  mixer { hstu {
    layer_groups { num_layers: 1  mask { window: 2  prefix: 1  unit: EVENTS } }
    layer_groups { num_layers: 2  tail_len: 2  tail_unit: EVENTS  mask { target_group_size: 2 } }
  } }
} }"""
TWO_CHANNELS = """model { ranker {
  preprocessor { contextual {
    channels { name: "like or long"  bits: [1, 3]  min_watch_time: 10  max_events: 4 }
    channels { name: "all" }
  } }
  mixer { mixture {
    stacks { channel: "like or long"  hstu { num_layers: 1  num_heads: 2  qk_dim: 4  scale_len: 3 } }
    stacks { channel: "all"  hstu {
      qk_dim: 4  v_dim: 3  scale_len: 5  bias { num_time_buckets: 40 }
      layer_groups {
        num_layers: 1  tail_len: 3  tail_unit: EVENTS
        mask { window: 2  prefix: 1  unit: EVENTS  target_group_size: 2 }
      }
    } }
  } }
} }"""
"""A stack that reads some events, and a truncated one with a mask that reads all of them: a layer each."""
TASK_OF_TWO_LOGITS = "tasks { name: 'like' loss { jrc {} } }"
RANKER_MMOE = f"model {{ ranker {{ head {{ mmoe {{ expert_dim: 8 }} }} {TASK_OF_TWO_LOGITS} }} }}"
RANKER_PLE = f"model {{ ranker {{ head {{ ple {{ num_levels: 2 }} }} {TASK_OF_TWO_LOGITS} }} }}"
BF16 = "model { precision: BF16 }"
LOG_TIMES = "model { ranker { preprocessor { contextual { positional { time_scale: LOG } } } } }"
CONCATENATED = "model { ranker { head { fusion { input: CONCAT } } } }"
MODELS = {
    "ranker hstu": (RANKER,),
    "ranker sasrec": (RANKER, RANKER_SASREC),
    "ranker linear behind a truncation": (RANKER, RANKER_LINEAR, RANKER_PLE),
    "ranker truncated": (RANKER, TRUNCATED),
    "ranker bf16": (RANKER, BF16, ONE_LAYER, LOG_TIMES, CONCATENATED),
    "ranker interleaved": RANKERS["interleaved"],
    "ranker all encoders": (*RANKERS["all"], TWO_CHANNELS, RANKER_MMOE),
    "ranker channels": RANKERS["channels"],
    "ranker interleaved channels": RANKERS["interleaved channels"],
    "retriever hstu": (RETRIEVER,),
    "retriever sasrec": (RETRIEVER, RETRIEVER_SASREC),
    "retriever linear": (RETRIEVER, RETRIEVER_LINEAR),
    "retriever hybrid": (RETRIEVER, RETRIEVER_HYBRID),
}
CAPTURED = ("ranker linear behind a truncation", "ranker bf16", "retriever hybrid")
"""Models that are always captured, which takes seconds; each part of the others, which are captured with
`--slow`, is in one of these, or in one that `test_cached_signature.py` or, as a whole graph with kernels,
`inference/test_triton_packages.py` captures."""

EXAMPLE = [(3, 2), (0, 3), (5, 0), (1, 1)]
SIZES = [
    [(1, 1)],
    [(0, 1)],
    [(0, 1), (0, 2)],  # no history
    [(2, 0), (0, 0)],  # no candidates
    [(0, 0), (0, 0)],  # nothing but rows
    [(6, 4)] * 9,
    [(4, 1), (0, 4), (6, 2)],
]


@pytest.fixture(params=MODELS)
def pipeline(request):
    return pipeline_of(*MODELS[request.param])


@pytest.fixture
def graph(pipeline):
    return ScoringGraph(build_model(pipeline)).eval()


def captured(graph, pipeline):
    """As the exporter does it: every named size dynamic, from 0 on."""
    specs, example = scoring_signature(pipeline), flatten(batch_of(pipeline, random_rows(pipeline, EXAMPLE)))
    dims = {name: torch.export.Dim(name, min=0) for spec in specs for name in spec.dims}
    shapes = tuple({axis: dims[name] for axis, name in enumerate(spec.dims)} for spec in specs)
    with symbolic.patch(backed_size_oblivious=True), torch.no_grad():
        return torch.export.export(graph, example, dynamic_shapes=(shapes,), strict=False)


def other_batches(pipeline):
    return [batch_of(pipeline, random_rows(pipeline, sizes, seed=n)) for n, sizes in enumerate(SIZES)]


def test_flatten_follows_the_signature(pipeline):
    specs = scoring_signature(pipeline)
    for batch in other_batches(pipeline):
        sizes = {}
        for spec, tensor in zip(specs, flatten(batch), strict=True):
            assert tensor.dtype == spec.dtype, spec.name
            assert tensor.is_contiguous() and tensor.storage_offset() == 0, spec.name
            for name, size in zip(spec.dims, tensor.shape, strict=True):
                assert sizes.setdefault(name, size) == size, spec.name
    assert len({spec.name for spec in specs}) == len(specs)


def test_the_order_of_a_batchs_numbers_does_not_matter():
    pipeline = pipeline_of(RANKER)
    batch = batch_of(pipeline, random_rows(pipeline, EXAMPLE))
    reversed_batch = dataclasses.replace(batch, numbers=dict(reversed(batch.numbers.items())))
    for got, want in zip(flatten(batch), flatten(reversed_batch), strict=True):
        assert torch.equal(got, want)


def test_the_graph_scores_as_the_model(graph, pipeline):
    for batch in other_batches(pipeline):
        torch.testing.assert_close(graph(*flatten(batch)), graph.model.score(batch))


def test_one_capture_serves_every_size(graph, pipeline, request):
    if request.node.callspec.params["pipeline"] not in CAPTURED and not request.config.getoption("--slow"):
        pytest.skip("slow: run with --slow")
    program = captured(graph, pipeline).module()
    for batch in other_batches(pipeline):
        expected = graph.model.score(batch)
        close = {"rtol": 0.02, "atol": 0.01} if pipeline.model.precision == pb.BF16 else {}
        torch.testing.assert_close(program(*flatten(batch)), expected, **close)


@pytest.mark.slow
def test_one_package_serves_every_size(graph, pipeline, tmp_path):
    path = str(tmp_path / "model.pt2")
    torch._inductor.aoti_compile_and_package(
        captured(graph, pipeline),
        package_path=path,
        inductor_configs={"aot_inductor.check_lowerbound": False, "shape_padding": False},
    )
    package = torch._inductor.aoti_load_package(path)
    for batch in other_batches(pipeline):
        expected = graph.model.score(batch)
        close = {"rtol": 0.02, "atol": 0.01} if pipeline.model.precision == pb.BF16 else {}
        torch.testing.assert_close(package(*flatten(batch)), expected, **close)


def test_a_signature_can_be_written_down():
    specs = scoring_signature(pipeline_of(RANKER))
    assert [spec.name for spec in specs] == [
        "gender",
        "uih_item_id",
        "candidate_item_id",
        "uih_tags",
        "uih_tags.counts",
        "candidate_tags",
        "candidate_tags.counts",
        "age",
        "candidate_price",
        "request_time",
        "uih_lengths",
        "uih_timestamps",
        "uih_actions",
        "uih_watch_time",
        "num_candidates",
        "candidate_timestamps",
        "steps",
    ]
    assert specs[4].to_json() == {"name": "uih_tags.counts", "dtype": "int64", "dims": ["events"]}
    assert [TensorSpec.from_json(spec.to_json()) for spec in specs] == specs


def test_a_retrievers_signature_has_no_candidates():
    names = [spec.name for spec in scoring_signature(pipeline_of(RETRIEVER))]
    assert names[0] == "uih_item_id"
    assert not any("candidate" in name for name in names)
