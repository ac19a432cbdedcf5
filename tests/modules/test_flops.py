"""`Model.flops` against PyTorch's counter of matrix products, and attention against pairs counted by hand."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from recsys.models import build_model
from tests.modules.pipelines import RANKER, RETRIEVER, batch_of, pipeline_of, random_rows

SIZES = [(3, 2), (0, 1), (6, 4)]


def products(counter: FlopCounterMode) -> int:
    """Products of two matrices: linear layers and scores, without attention, whose products are batched."""
    counts = counter.get_flop_counts()["Global"]
    return counts[torch.ops.aten.mm] + counts[torch.ops.aten.addmm]


def test_a_ranker():
    pipeline = pipeline_of(RANKER)
    # Its vectors are summed by a product with zeros and ones.
    pipeline.model.ranker.preprocessor.contextual.ClearField("action")
    model = build_model(pipeline)
    batch = batch_of(pipeline, random_rows(pipeline, SIZES))
    with FlopCounterMode(display=False) as counter:
        model(batch)
    # 2 contextual tokens see each other and the history; events see these and what came before; candidates
    # see all that and themselves.
    pairs = sum(2 * (2 + u) + u * 2 + u * (u + 1) // 2 + n * (2 + u + 1) for u, n in SIZES)
    layers = len(model.mix.layers)
    assert model.flops(batch) == products(counter) + layers * 2 * pairs * 2 * (4 + 3)


@pytest.mark.parametrize(
    ("change", "negatives"),
    [("", None), ("model { retriever { loss { softmax { uniform {} } } } }", [3, 1, 4, 1, 5])],
    ids=["full", "sampled"],
)
def test_a_retriever_and_that_training_is_three_times_the_forward_pass(change, negatives):
    pipeline = pipeline_of(RETRIEVER, change)
    pipeline.model.retriever.preprocessor.uih.ClearField("action")
    model = build_model(pipeline)
    batch = batch_of(pipeline, random_rows(pipeline, SIZES), negatives)
    with FlopCounterMode(display=False) as counter:
        loss = model.objective(model(batch), batch).sums.sum()
        forward = products(counter)
        loss.backward()
    attention = len(model.mix.layers) * 2 * sum(u * (u + 1) // 2 for u, _ in SIZES) * 2 * (4 + 3)
    assert model.flops(batch) == forward + attention
    assert products(counter) == 3 * forward
