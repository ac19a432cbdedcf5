"""A training step never waits for the device: no form of ranker reads a number that lies there.

On a CPU the device is `meta`, whose tensors have sizes and no numbers: whoever reads one gets an error. On
CUDA torch's own debug mode says so, and sees kernels that `meta` does not run.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from recsys import protos as pb
from recsys.data.batch import Batch
from recsys.models import Model, build_model
from tests.modules.pipelines import RANKER, RANKERS, RETRIEVER, batch_of, pipeline_of, random_rows

SIZES = [(5, 3), (0, 2), (6, 1), (2, 0)]
DROPOUT = "model { ranker { preprocessor { contextual { dropout: 0.1 } } } }"
SEEN = "model { retriever { seen: REMOVE } }"
GROUPS = """model { ranker { mixer { hstu {
  dropout: 0.1  stochastic_depth: 0.5  recompute: [NORMED_X, UVQK, GATED]
  layer_groups { num_layers: 1  mask { window: 2  prefix: 1 } }
  layer_groups { num_layers: 1  mask { window: 2  target_window: true }  tail_len: 3 }
} } } }"""
FORMS = {**{name: (*texts, DROPOUT) for name, texts in RANKERS.items()}, "groups": (RANKER, DROPOUT, GROUPS)}
ON_CUDA = {**FORMS, "retriever": (RETRIEVER,), "retriever, seen items": (RETRIEVER, SEEN)}

WIDE = (
    """model { embedding_dim: 128  precision: BF16  ranker { mixer { hstu { qk_dim: 64  v_dim: 64 } } } }"""
)
GROUPS_WIDE = """num_heads: 2  qk_dim: 64  dropout: 0.1
  layer_groups { num_layers: 1  mask { window: 2  prefix: 1 } }
  layer_groups { num_layers: 1  mask { window: 2  target_window: true }  tail_len: 3 }"""
CHANNELS_WIDE = f"""model {{ ranker {{
  preprocessor {{ contextual {{ channels {{ name: "click"  bits: 0 }}  channels {{ name: "all" }} }} }}
  mixer {{ mixture {{
    stacks {{ channel: "click"  hstu {{ {GROUPS_WIDE} }} }}
    stacks {{ channel: "all"  hstu {{ {GROUPS_WIDE} }} }}
  }} }}
}} }}"""
IN_BFLOAT16 = {
    "plain": "",
    "groups": f"model {{ ranker {{ mixer {{ hstu {{ {GROUPS_WIDE} }} }} }} }}",
    "channels": CHANNELS_WIDE,
}


@contextmanager
def no_waiting() -> Iterator[None]:
    """CUDA operations that wait raise."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def batch_on(pipeline: pb.Pipeline, device: str, seed: int = 0) -> Batch:
    """A batch as the loader hands it over: how many ids each column has is known on the host."""
    batch = batch_of(pipeline, random_rows(pipeline, SIZES, seed))
    batch.ids.length_per_key()
    return batch.to(torch.device(device))


def step(model: Model, batch: Batch) -> None:
    """Forward pass, objective, backward pass."""
    losses = model.objective(model(batch), batch)
    (losses.sums / losses.counts.clamp(min=1)).sum().backward()


@torch.no_grad()
def evaluation(model: Model, batch: Batch, *, losses: bool = True) -> None:
    """Forward pass, objective, and the rows of metrics."""
    outputs = model.eval()(batch)
    if losses:
        model.objective(outputs, batch)
    model.metric_rows(outputs, batch)


def name_backend(pipeline: pb.Pipeline, backend: str) -> None:
    """In every stack."""
    mixer = getattr(pipeline.model, pipeline.model.WhichOneof("model")).mixer
    for stack in [item.hstu for item in mixer.mixture.stacks] or [mixer.hstu]:
        stack.backend = backend


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", FORMS)
def test_a_step_without_numbers(name, training):
    pipeline = pipeline_of(*FORMS[name])
    model, batch = build_model(pipeline).to("meta").train(training), batch_on(pipeline, "meta")
    step(model, batch)
    assert model.flops(batch) > 0


@pytest.mark.parametrize("name", ON_CUDA)
def test_an_evaluation_without_numbers(name):
    """Without losses, since those of retrievers do not run on `meta`."""
    pipeline = pipeline_of(*ON_CUDA[name])
    evaluation(build_model(pipeline).to("meta"), batch_on(pipeline, "meta"), losses=False)


class Reads(torch.nn.Module):
    """Operations that read numbers of a device, which must not happen."""

    def forward(self, values: torch.Tensor, timestamps: torch.Tensor) -> torch.Tensor:
        return values * float(timestamps.max())


def test_a_model_that_reads_a_number_is_found():
    pipeline = pipeline_of(RANKER)
    model = build_model(pipeline).to("meta")
    model.postprocess = Reads()
    with pytest.raises(RuntimeError, match="meta"):
        step(model, batch_on(pipeline, "meta"))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("name", ON_CUDA)
def test_a_step_on_cuda_does_not_wait(name, backend):
    pipeline = pipeline_of(*ON_CUDA[name])
    name_backend(pipeline, backend)
    assert_no_waiting(pipeline)


@pytest.mark.gpu
@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_a_step_in_bfloat16_on_cuda_does_not_wait(name):
    """With the kernels that are chosen for wide models, which those of `ON_CUDA` are too narrow for."""
    assert_no_waiting(pipeline_of(RANKER, DROPOUT, WIDE, IN_BFLOAT16[name]))


def assert_no_waiting(pipeline: pb.Pipeline) -> None:
    """In training and in evaluation, once all kernels are compiled."""
    model = build_model(pipeline).to("cuda").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    first, second = (batch_on(pipeline, "cuda", seed) for seed in (0, 1))
    step(model, first)  # kernels are compiled, and the optimizer makes its state
    optimizer.step()
    evaluation(model, first)
    model.train()
    with no_waiting():
        optimizer.zero_grad()
        step(model, second)
        optimizer.step()
        evaluation(model, second)
