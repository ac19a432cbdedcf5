"""Other forms of sequences: trained, captured as for a package, predicted, equal to evaluation.

All in this process; the program is captured and not compiled, which `test_export_predict` does.
"""

from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
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
INTERLEAVED = (
    f"{CONTEXTUAL}.action={{{BITS} concatenated {{contextualized {{rank: 4}}}}}}",
    f"{CONTEXTUAL}.action_placement=INTERLEAVED",
    f"{CONTEXTUAL}.content_contextualized={{context_dim: 8 hidden: 16}}",
    f"{CONTEXTUAL}.joined_contextual={{num_tokens: 2}}",
    "model.ranker.postprocessor={timestamp_layer_norm {utc_offset_minutes: 480}}",
)
GROUPS = "layer_groups {mask {window: 4 prefix: 2}} layer_groups {num_layers: 1 tail_len: 5}"
STACK = f"num_heads: 2 qk_dim: 8 {GROUPS}"
NAMED = "{name: 'click' bits: 0 max_events: 12}, {name: 'long' bits: 6 min_watch_time: 10}"
CHANNELS = (
    f"{CONTEXTUAL}.channels=[{NAMED}]",
    f"model.ranker.mixer={{mixture {{stacks {{channel: 'click' hstu {{{STACK}}}}} "
    f"stacks {{channel: 'long' hstu {{{STACK}}}}}}}}}",
)
# Two joined tokens or one a feature, 20 events of two tokens or one, 5 candidates.
FORMS = {"interleaved with every encoder": (INTERLEAVED, 47), "two channels": (CHANNELS, None)}


def captured(graph, pipeline, batch):
    """The program that a package is compiled from."""
    specs = scoring_signature(pipeline)
    dims = {name: torch.export.Dim(name, min=0) for spec in specs for name in spec.dims}
    shapes = tuple({axis: dims[name] for axis, name in enumerate(spec.dims)} for spec in specs)
    with symbolic.patch(backed_size_oblivious=True), torch.no_grad():
        program = torch.export.export(graph, flatten(batch), dynamic_shapes=(shapes,), strict=False)
    return program.module()


@pytest.mark.parametrize("form", FORMS)
def test_trains_and_predicts_what_evaluation_says(tmp_path, form):
    given, longest = FORMS[form]
    rows = pq.read_table("tests/data/kuairand/test.parquet").slice(0, 150)
    path = tmp_path / "rows.parquet"
    pq.write_table(rows, path, row_group_size=60)
    changes = [
        *given,
        "train.evaluation={}",
        "train.num_steps=12",
        f'data.test={{parquet {{paths: "{path}"}}}}',
    ]
    assert train(tmp_path / "run", *changes) == 0
    losses = [record["loss"] for record in records(tmp_path / "run").values()]
    assert len(losses) == 12 and np.isfinite(losses).all()
    pipeline = config.resolve(config.read(CONFIG, changes).pipeline).pipeline
    assert longest in (None, pipeline.model.max_seq_len)

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
