"""A package with a store of users, without HTTP and in one process: whom it knows again, and by what."""

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from recsys import protos as pb
from recsys.data.schema.contract import file_columns
from recsys.errors import ConfigError, RecsysError
from recsys.inference.predictor import Predictor
from recsys.inference.shared_rows import BlockScores
from recsys.inference.stored_scores import StoredScores
from recsys.serving import model, scoring_process
from recsys.serving.arrow_schema import ArrowSchema
from recsys.serving.batch_scorer import BatchScorer
from recsys.serving.batcher import BatchLimits
from recsys.serving.messages import Loaded, Order
from recsys.serving.metrics import Metrics
from recsys.serving.model import Prepared, row_batch, schema_of
from recsys.serving.rows import ArrowRows, JsonRows
from recsys.serving.schema import RequestLimits
from tests.inference.test_shared_rows import TABLE, Watched, pipeline_of
from tests.tools.arrow_streams import stream_of

LIMITS = RequestLimits(10, 100, 100)
ROW = TABLE.slice(1, 1).to_pylist()[0]


def served(folder, *, cached: bool = True) -> BatchScorer:
    package = Watched(pipeline_of(), cached=cached)
    (folder / "manifest.json").write_text("{}")
    package.folder, package.description.step = folder, 1
    return BatchScorer(package, pb.UserStore(host_mib=16))


def test_a_user_is_known_by_the_first_key_column_or_by_history(tmp_path, monkeypatch):
    monkeypatch.setattr(StoredScores, "_measure", lambda self, size, block: None)
    expected = Predictor(Watched(pipeline_of(), cached=False)).table(TABLE.slice(1, 1))
    scorer = served(tmp_path)
    schema = schema_of(scorer.loaded, LIMITS)
    fields = schema.request.model_json_schema()["$defs"]["Row"]["properties"]
    row = {name: value for name, value in ROW.items() if name in fields}
    older = row | {name: row[name][:-1] for name in row if name.startswith("uih_")}
    nobody = {name: value for name, value in row.items() if name not in ("user_id", "request_id")}

    def ask(*rows: dict) -> Counter:
        """Asks for each row in a request of its own, together in one batch."""
        requests = [Prepared(JsonRows(schema, schema.parse({"rows": [row]}).rows), 0, [0]) for row in rows]
        scored = scorer.score(row_batch(schema, requests, scorer.loaded.keeps_users))
        for name in ("is_click", "watch_time"):
            assert scored.columns[name][-1] == pytest.approx(expected[name][0].as_py(), abs=1e-5)
        assert scored.seconds.keys() == {"convert", "score"} and min(scored.seconds.values()) > 0
        return +Counter(scored.ways)

    assert ask(row) == {"encoded": 1}
    assert ask(row) == {"reused": 1}
    # One entry per user: that of the older history takes the place of the newer one.
    assert ask(older, row) == {"encoded": 1, "reused": 1}
    assert ask(older, row | {"user_id": 7}) == {"reused": 1, "encoded": 1}
    assert ask(nobody) == {"encoded": 1}
    assert ask(older, nobody) == {"reused": 2}
    # A stream has columns of the same users, here with the user as a text.
    columns = ArrowSchema(file_columns(pipeline_of(), "predict"), schema.keys, LIMITS)
    table = pa.Table.from_pylist([older | {"user_id": str(row["user_id"])}, nobody])
    mixed = [
        Prepared(JsonRows(schema, schema.parse({"rows": [row | {"user_id": 8}]}).rows), 0, [0]),
        Prepared(ArrowRows(columns.parse(stream_of(table))), 0, range(2)),
    ]
    scored = scorer.score(row_batch(schema, mixed, scorer.loaded.keeps_users))
    assert +Counter(scored.ways) == {"reused": 2, "encoded": 1}
    for name in ("is_click", "watch_time"):
        for scores in scored.columns[name][::2]:
            assert scores == pytest.approx(expected[name][0].as_py(), abs=1e-5)


def test_a_package_without_the_programs_cannot_keep_users(tmp_path):
    with pytest.raises(ConfigError, match="export it with export.cached_scoring: true"):
        served(tmp_path, cached=False)


class Stub:
    """Stands in for a process that has loaded a package."""

    def __init__(self, version: str = "1", keeps_users: bool = False) -> None:
        self.loaded = Loaded(pipeline_of(), version, ["is_click"], None, None, keeps_users)
        self.killed = False

    def kill(self) -> None:
        self.killed = True


def test_several_processes_load_the_same_package(monkeypatch):
    waiting = [Stub("1"), Stub("2"), Stub("2")]
    started = list(waiting)
    monkeypatch.setattr(scoring_process, "ScoringProcess", lambda order: waiting.pop(0))
    with pytest.raises(RecsysError, match="^a: the package was replaced while it was loaded; load it again$"):
        scoring_process.start(Order(Path("a")), 2)
    assert [process.killed for process in started] == [True, True, False]
    assert scoring_process.start(Order(Path("a")), 1) == [started[2]]


def test_users_are_kept_by_a_single_process(monkeypatch):
    processes = [Stub(keeps_users=True), Stub(keeps_users=True)]
    monkeypatch.setattr(model, "start", lambda order, count: processes)
    with pytest.raises(ConfigError, match="--processes: a keeps users, .*; give 1, or start several servers"):
        model.ServingModel(Order(Path("a")), LIMITS, BatchLimits(1, 0.0, 1), Metrics(), processes=2)
    assert all(process.killed for process in processes)


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_batch_with_a_score_that_json_does_not_have_fails(tmp_path, monkeypatch, score):
    """The batcher then has its requests scored alone, so that only those without such scores are answered."""
    scorer = served(tmp_path)
    schema = schema_of(scorer.loaded, LIMITS)
    fields = schema.request.model_json_schema()["$defs"]["Row"]["properties"]
    row = {name: value for name, value in ROW.items() if name in fields}
    rows = JsonRows(schema, schema.parse({"rows": [row]}).rows)
    batch = row_batch(schema, [Prepared(rows, 0, [0])], True)
    scores = scorer.score(batch).columns["is_click"]
    flat = np.full((len(scores[0]), len(scorer.loaded.outputs)), score, np.float32)
    monkeypatch.setattr(BlockScores, "of", lambda self, block: flat)
    with pytest.raises(ValueError, match="scores that are not finite"):
        scorer.score(batch)
