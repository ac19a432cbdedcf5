"""Other forms of sequences: trained, predicted as by a package, equal to evaluation.

All in this process. `tests/scoring` captures the scoring graphs of these forms.
"""

import numpy as np
import pyarrow.parquet as pq
import pytest

from recsys import config
from recsys.inference.predictor import Predictor
from recsys.inference.stored_scores import REUSED, StoredScores
from recsys.scoring import scorer
from recsys.scoring.signature import ScoringGraph
from tests.integration import parity
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


@pytest.mark.parametrize("form", FORMS)
def test_trains_and_predicts_what_evaluation_says(tmp_path, form, monkeypatch):
    given, longest = FORMS[form]
    rows = pq.read_table("tests/data/kuairand/test.parquet").slice(0, 150)
    path = tmp_path / "rows.parquet"
    pq.write_table(rows, path, row_group_size=60)
    changes = [
        *given,
        "train.evaluation={}",
        "train.num_steps=4",
        f'data.test={{parquet {{paths: "{path}"}}}}',
    ]
    assert train(tmp_path / "run", *changes) == 0
    losses = [record["loss"] for record in records(tmp_path / "run").values()]
    assert len(losses) == 4 and np.isfinite(losses).all()
    pipeline = config.resolve(config.read(CONFIG, changes).pipeline).pipeline
    assert longest in (None, pipeline.model.max_seq_len)

    model = parity.trained_model(tmp_path / "run", pipeline)
    batches = parity.evaluated_batches(pipeline)
    package = parity.package_of(model, batches, ScoringGraph(model).eval())
    parity.assert_predicted(model, batches, rows, Predictor(package).table(rows))
    cached = parity.with_cache(package, model)
    monkeypatch.setattr(scorer, "ONE_PASS", 0)  # else such short lists would not use it
    parity.assert_predicted(model, batches, rows, Predictor(cached).table(rows))
    # A package with a store: the second time, it has users whose last row is their only one.
    with_store = config.resolve(config.read(CONFIG, [*changes, "predict.user_store={}"]).pipeline).pipeline
    monkeypatch.setattr(StoredScores, "_measure", lambda self, size, block: None)
    predictor = Predictor(cached, with_store)
    for _ in range(2):
        parity.assert_predicted(model, batches, rows, predictor.table(rows))
    assert predictor.stored.rows[REUSED] > 50
