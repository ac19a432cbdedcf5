"""Interleaved events with every encoder: trained, captured as for a package, predicted, equal to evaluation.

All in this process; the program is captured and not compiled, which `test_export_predict` does.
"""

from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import torch
from torch.fx.experimental import _config as symbolic

from recsys import config
from recsys.data.loader import Loader
from recsys.inference.predictor import Predictor
from recsys.models import build_model, layout_rule
from recsys.models.scoring import ScoringGraph, flatten, scoring_signature
from recsys.training import checkpoint
from recsys.training.session import CHECKPOINTS
from tests.integration.runs import CONFIG, records, train

CONTEXTUAL = "model.ranker.preprocessor.contextual"
BITS = "bits {name: 'is_click' bit: 0} bits {name: 'long_view' bit: 6} watch_time_thresholds: [3, 10]"
CHANGES = (
    f"{CONTEXTUAL}.action={{{BITS} concatenated {{contextualized {{rank: 4}}}}}}",
    f"{CONTEXTUAL}.action_placement=INTERLEAVED",
    f"{CONTEXTUAL}.content_contextualized={{context_dim: 8 hidden: 16}}",
    f"{CONTEXTUAL}.joined_contextual={{num_tokens: 2}}",
    "model.ranker.postprocessor={timestamp_layer_norm {utc_offset_minutes: 480}}",
    "train.evaluation={}",
    "train.num_steps=12",
)


def captured(graph, pipeline, batch):
    """The program that a package is compiled from."""
    specs = scoring_signature(pipeline)
    dims = {name: torch.export.Dim(name, min=0) for spec in specs for name in spec.dims}
    shapes = tuple({axis: dims[name] for axis, name in enumerate(spec.dims)} for spec in specs)
    with symbolic.patch(backed_size_oblivious=True), torch.no_grad():
        program = torch.export.export(graph, flatten(batch), dynamic_shapes=(shapes,), strict=False)
    return program.module()


def test_trains_and_predicts_what_evaluation_says(tmp_path):
    rows = pq.read_table("tests/data/kuairand/test.parquet").slice(0, 150)
    path = tmp_path / "rows.parquet"
    pq.write_table(rows, path, row_group_size=60)
    changes = [*CHANGES, f'data.test={{parquet {{paths: "{path}"}}}}']
    assert train(tmp_path / "run", *changes) == 0
    losses = [record["loss"] for record in records(tmp_path / "run").values()]
    assert len(losses) == 12 and np.isfinite(losses).all()
    pipeline = config.resolve(config.read(CONFIG, changes).pipeline).pipeline
    # Two joined tokens, 20 events of two tokens, 5 candidates.
    assert pipeline.model.max_seq_len == 47

    model = build_model(pipeline).eval()
    checkpoint.load_weights(checkpoint.find(tmp_path / "run" / CHECKPOINTS, "newest"), model)
    batches = list(Loader(pipeline, "test", layout_rule(pipeline), mode="evaluate").epoch(0))
    program = captured(ScoringGraph(model), pipeline, batches[0])
    expected = {}
    with torch.no_grad():
        for batch in batches:
            scores = model.score(batch)
            torch.testing.assert_close(program(*flatten(batch)), scores, rtol=1e-4, atol=1e-5)
            parts = scores.split(batch.num_candidates.tolist())
            expected |= dict(zip(batch.rows.row.tolist(), parts, strict=True))

    package = SimpleNamespace(
        pipeline=pipeline,
        items=None,
        description=SimpleNamespace(outputs=[task.name for task in pipeline.model.ranker.tasks]),
        run=lambda batch: program(*flatten(batch)).detach(),
    )
    found = Predictor(package).table(rows)
    assert len(expected) == len(found)
    for row, answer in enumerate(found.to_pylist()):
        # Evaluation keeps 5 candidates of a row.
        predicted = torch.tensor([answer["is_click"][:5], answer["watch_time"][:5]]).T
        torch.testing.assert_close(predicted, expected[row], rtol=1e-4, atol=1e-5)
