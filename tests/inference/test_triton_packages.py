"""Packages with Triton's kernels, of models that drop tokens on the way, so that sizes depend on data."""

import sys

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")

from recsys import environment
from recsys.inference.compiler import compile_graph
from recsys.inference.program import Program
from recsys.ops.runtime import triton_support
from recsys.scoring.signature import ScoringGraph, example_inputs, inputs_of, scoring_signature
from tests.modules.pipelines import CHANNELS, RANKER, RANKERS, batch_of, pipeline_of, random_rows
from tests.scoring.test_prefill import HYBRID, build

FORMS = {"hybrid": (RANKER, HYBRID), "all encoders, channels": (*RANKERS["all"], CHANNELS)}
CALLS = [[(3, 2)], [(0, 1)], [(0, 0)], [(6, 1), (0, 2), (2, 0), (1, 4)], [(5, 9)] * 4]
"""Events and candidates of the rows of calls; the third has neither."""


@pytest.fixture
def without_a_gpu(monkeypatch):
    """The kernels count as able to run on a CPU, where a capture launches none of them."""
    asked = triton_support.support
    for name, module in list(sys.modules.items()):
        if name.startswith("recsys.ops") and getattr(module, "support", None) is asked:
            monkeypatch.setattr(module, "support", lambda device, dtype: triton_support.SUPPORTED)
    monkeypatch.setattr(triton_support, "num_processors", lambda device: 132)


@pytest.mark.parametrize("form", ["all encoders, channels", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_a_graph_with_kernels_is_captured_whatever_the_number_of_tokens_that_are_left(
    form, without_a_gpu, monkeypatch, tmp_path
):
    captured = []
    compiler = "aoti_compile_and_package"
    monkeypatch.setattr(torch._inductor, compiler, lambda graph, **_: captured.append(graph))
    model = build(pipeline_of(*FORMS[form])).eval()
    specs = scoring_signature(model.pipeline)
    example = example_inputs(specs, torch.device("cpu"))
    recordable = compile_graph(ScoringGraph(model), specs, example, tmp_path / "model.pt2", model.pipeline)
    assert not recordable, "a truncation reads sizes from the device"
    called = {str(node.target) for node in captured[0].graph.nodes}
    assert "recsys.hstu_attention_triton.default" in called
    # For a GPU, Inductor compiles no search in a view of a tensor that it computes. Kernels need none.
    assert "aten.searchsorted.Tensor" not in called


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_package_scores_as_its_model(form, tmp_path):
    """Compiled ahead of time, which takes a minute."""
    if environment.find_cxx() is None:
        pytest.skip("there is no C++ compiler")
    cuda = torch.device("cuda")
    model = build(pipeline_of(*FORMS[form])).to(cuda).eval()
    specs, path = scoring_signature(model.pipeline), tmp_path / "model.pt2"
    compile_graph(ScoringGraph(model), specs, example_inputs(specs, cuda), path, model.pipeline)
    program = Program(path, specs, cuda)
    with torch.no_grad():
        for sizes in CALLS * 2:
            batch = batch_of(model.pipeline, random_rows(model.pipeline, sizes))
            (scores,) = program(inputs_of(batch, model.pipeline))
            torch.testing.assert_close(scores, model.score(batch.to(cuda)).float(), rtol=1e-4, atol=1e-4)
