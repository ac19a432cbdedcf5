"""The item tower as a graph: the vectors of the model, eager and captured, for any number of items."""

import pytest
import torch
from torch.fx.experimental import _config as symbolic

from recsys.models import build_model
from recsys.models.item_tower import ItemTower, first_items, flatten_items, item_signature
from recsys.scoring.signature import example_inputs
from tests.modules.pipelines import RETRIEVER, TWO_TOWER, batch_of, pipeline_of, random_rows

ENCODER = "model { retriever { item_encoder { %s } } }"
TEXTS = {
    "features": (TWO_TOWER,),
    "no embedding": (TWO_TOWER, ENCODER % "own_embedding: false"),
    "residual": (TWO_TOWER, ENCODER % "residual: true"),
    "bf16": (TWO_TOWER, "model { precision: BF16 }"),
    "embedding only": (RETRIEVER, ENCODER % "mlp { hidden: 3 }"),
}


@pytest.fixture(params=TEXTS)
def pipeline(request):
    return pipeline_of(*TEXTS[request.param])


def test_the_graph_gives_the_vectors_of_the_model(pipeline):
    model = build_model(pipeline).eval()
    for name, parameter in model.named_parameters():
        if name.startswith("compare"):
            torch.nn.init.normal_(parameter, std=0.5)
    graph, specs = ItemTower(model).eval(), item_signature(pipeline)
    dims = {name: torch.export.Dim(name, min=0) for spec in specs for name in spec.dims}
    shapes = tuple({0: dims[spec.dims[0]]} for spec in specs)
    # The whole catalogue, as evaluation has it, then fewer items.
    whole = batch_of(pipeline, random_rows(pipeline, [(3, 1), (1, 1)]))
    inputs = flatten_items(whole, pipeline)
    with symbolic.patch(backed_size_oblivious=True), torch.no_grad():
        example = example_inputs(specs, torch.device("cpu"))
        captured = torch.export.export(graph, example, dynamic_shapes=(shapes,), strict=False).module()
        expected = model.item_vectors(whole)
        for most in (None, 7, 1, 0):
            first = first_items(inputs, specs, most)
            torch.testing.assert_close(graph(*first), expected[:most])
            torch.testing.assert_close(captured(*first), expected[:most])
    assert expected.dtype == torch.float32 and expected.shape == (20, 8)
