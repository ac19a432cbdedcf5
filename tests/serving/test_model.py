"""A served package with a store of users, without HTTP: whom it knows again, and by what."""

import asyncio
import time
from collections import Counter

import pytest

from recsys import protos as pb
from recsys.errors import ConfigError
from recsys.inference.predictor import Predictor
from recsys.inference.stored_scores import StoredScores
from recsys.serving.batcher import BatchLimits
from recsys.serving.model import ServingModel, StoreOptions
from recsys.serving.schema import RequestLimits
from tests.inference.test_shared_rows import TABLE, Watched, pipeline_of

LIMITS = RequestLimits(10, 100, 100), BatchLimits(8, 0.0, 8)
ROW = TABLE.slice(1, 1).to_pylist()[0]


def served(folder, ways: Counter, *, cached: bool = True) -> ServingModel:
    package = Watched(pipeline_of(), cached=cached)
    (folder / "manifest.json").write_text("{}")
    package.folder, package.description.step = folder, 1
    store = StoreOptions(pb.UserStore(host_mib=16), lambda way, rows: ways.update({way: rows}))
    return ServingModel(package, *LIMITS, store=store)


def test_a_user_is_known_by_the_first_key_column_or_by_history(tmp_path, monkeypatch):
    monkeypatch.setattr(StoredScores, "_measure", lambda self, size, block: None)
    ways, expected = Counter(), Predictor(Watched(pipeline_of(), cached=False)).table(TABLE.slice(1, 1))
    model = served(tmp_path, ways)
    fields = model.schema.request.model_json_schema()["$defs"]["Row"]["properties"]
    row = {name: value for name, value in ROW.items() if name in fields}
    older = row | {name: row[name][:-1] for name in row if name.startswith("uih_")}
    nobody = {name: value for name, value in row.items() if name not in ("user_id", "request_id")}

    def ask(*rows: dict) -> Counter:
        before, prepared = Counter(ways), model.prepare({"rows": list(rows)})

        async def answered() -> dict:
            return await model.batcher.submit(prepared, len(rows), time.monotonic() + 60)

        answer = asyncio.run(answered())
        for name in ("is_click", "watch_time"):
            assert answer[name][-1] == pytest.approx(expected[name][0].as_py(), abs=1e-5)
        return ways - before

    try:
        assert ask(row) == {"encoded": 1}
        assert ask(row) == {"reused": 1}
        # One entry per user: that of the older history takes the place of the newer one.
        assert ask(older, row) == {"encoded": 1, "reused": 1}
        assert ask(older, row | {"user_id": 7}) == {"reused": 1, "encoded": 1}
        assert ask(nobody) == {"encoded": 1}
        assert ask(older, nobody) == {"reused": 2}
    finally:
        model.batcher.close(10)


def test_a_package_without_the_programs_cannot_keep_users(tmp_path):
    with pytest.raises(ConfigError, match="export it with export.cached_scoring: true"):
        served(tmp_path, Counter(), cached=False)
