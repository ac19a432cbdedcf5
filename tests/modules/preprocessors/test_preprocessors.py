"""Every preprocessor keeps its contract; a new one from the registry only needs a pipeline here."""

import pytest
import torch

from recsys import protos as pb
from recsys.config import registry
from recsys.modules import preprocessors  # noqa: F401
from recsys.modules.embedding import EmbeddingGroup
from tests.modules.pipelines import RANKERS, RETRIEVER, batch_of, pipeline_of, random_rows

PIPELINES = {
    **{f"contextual {name}": texts for name, texts in RANKERS.items()},
    "uih": (RETRIEVER,),
    "uih mlp": (RETRIEVER, "model { retriever { preprocessor { uih { content { hidden: 5 } } } } }"),
}
SIZES = [(3, 2), (0, 1), (6, 3), (1, 1)]


def test_every_preprocessor_is_tested():
    assert {name.split()[0] for name in PIPELINES} == registry.registered(pb.Preprocessor).keys()


@pytest.fixture(params=PIPELINES)
def built(request):
    pipeline = pipeline_of(*PIPELINES[request.param])
    model = registry.pick(pipeline.model).config
    chosen = registry.pick(model.preprocessor)
    assert model.preprocessor.WhichOneof("preprocessor") == request.param.split()[0]
    return pipeline, EmbeddingGroup(pipeline), chosen.cls(chosen.config, pipeline=pipeline)


def prepare(built, rows):
    pipeline, embed, module = built
    batch = batch_of(pipeline, rows)
    return module(embed(batch), batch)


def test_tokens_follow_the_layout_of_the_reader(built):
    pipeline = built[0]
    batch = batch_of(pipeline, random_rows(pipeline, SIZES))
    prepared = built[2](built[1](batch), batch)
    assert prepared.sequence.layout is batch.sequences
    assert prepared.sequence.values.shape == (batch.sequences.total_len, pipeline.model.embedding_dim)
    assert prepared.sequence.values.dtype == torch.float32


def test_a_row_is_prepared_alike_alone_and_in_a_batch(built):
    rows = random_rows(built[0], SIZES)
    together = prepare(built, rows).sequence
    parts = together.values.split(together.layout.lengths.tolist())
    for number, row in enumerate(rows):
        expected = torch.cat(parts[number :: len(rows)])  # of each channel, where there are some
        torch.testing.assert_close(prepare(built, [row]).sequence.values, expected)


def test_every_parameter_gets_a_gradient(built):
    prepared = prepare(built, random_rows(built[0], SIZES))
    total = (prepared.sequence.values * torch.randn_like(prepared.sequence.values)).sum()
    if prepared.candidates is not None:
        total = total + prepared.candidates.sum()
    total.backward()
    idle = [name for name, p in built[2].named_parameters() if p.grad is None or not p.grad.any()]
    # What a slice cuts off is not used: here the price, which events lack.
    sliced = built[0].model.ranker.preprocessor.contextual.HasField("content_slice")
    assert idle == (["content.missing.uih_price"] if sliced else [])


def test_labels_do_not_matter(built):
    rows = random_rows(built[0], SIZES)
    if not built[0].model.ranker.tasks:
        pytest.skip("no labels")
    relabeled = [row.changed(labels={k: [1 - x for x in v] for k, v in row.labels.items()}) for row in rows]
    torch.testing.assert_close(
        prepare(built, rows).sequence.values, prepare(built, relabeled).sequence.values, rtol=0, atol=0
    )


def test_products_in_bfloat16_are_summed_in_float32(built):
    rows = random_rows(built[0], SIZES)
    exact = prepare(built, rows).sequence.values
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = prepare(built, rows).sequence.values
    assert rounded.dtype == torch.float32
    assert (rounded - exact).norm() / exact.norm() < 0.01
