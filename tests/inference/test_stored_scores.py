"""A store of users never changes a score, whatever happens to histories, memory, weights and threads.

The oracle is the same model without a store, which scores every row in one pass.
"""

import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import recsys
from recsys import config
from recsys.errors import ConfigError
from recsys.inference import stored_scores
from recsys.inference.cached_programs import CachedDescription, CachedPrograms
from recsys.inference.eager import EagerPackage
from recsys.inference.predictor import Predictor
from recsys.inference.stored_scores import ENCODED, EXTENDED, REUSED, WITHOUT, StoredScores
from recsys.models import build_model
from recsys.modules.mixer_declarations import LinearDeclaration
from recsys.modules.mixers import cached_stack
from tests.integration import parity

CONFIG = "tests/integration/tiny.config"
TABLE = pq.read_table("tests/data/kuairand/test.parquet")
ROWS = [row for row in TABLE.to_pylist() if len(row["uih_item_id"]) > 2 and row["candidate_item_id"]]
HISTORY = [name for name in TABLE.column_names if name.startswith("uih_")]
START = "model.ranker.preprocessor.contextual.positional={origin: START num_time_buckets: 0}"
HEADS, BLIND = "num_heads: 2 qk_dim: 8", "mask { contextual_reads_history: false }"
CHANNELS = """model.ranker.preprocessor.contextual.channels=[
  { name: "some" bits: [0, 6]%s }, { name: "all" }]"""
MIXTURE = f"""model.ranker.mixer={{ mixture {{
  stacks {{ channel: "some" hstu {{ num_layers: 1 {HEADS} {BLIND} }} }}
  stacks {{ channel: "all" hstu {{ num_layers: 2 {HEADS} {BLIND} }} }} }} }}"""
LINEAR = f"linear {{ num_layers: 2 {HEADS} form: DELTA time_channel: false }}"
FORMS = {
    "grows": (START, f"model.ranker.mixer={{ hstu {{ num_layers: 2 {HEADS} {BLIND} }} }}"),
    "a truncation": (
        START,
        f"model.ranker.mixer={{ hstu {{ {HEADS} layer_groups {{ num_layers: 2 {BLIND} }}"
        f" layer_groups {{ num_layers: 1 tail_len: 6 {BLIND} }} }} }}",
    ),
    "a truncation before two layers": (
        START,
        f"model.ranker.mixer={{ hstu {{ {HEADS} layer_groups {{ num_layers: 1 {BLIND} }}"
        f" layer_groups {{ num_layers: 2 tail_len: 14 {BLIND} }} }} }}",
    ),
    "channels": (START, CHANNELS % "", MIXTURE),
    "a channel's window": (START, CHANNELS % " max_events: 3", MIXTURE),
    "times between events": (START, CHANNELS % "", MIXTURE.replace("num_layers: 2", "num_layers: 2 bias {}")),
    "ages": (),
    "states": (START, f"model.ranker.mixer={{ {LINEAR} }}"),
    "hybrid": (
        START,
        f"model.ranker.mixer={{ hybrid {{ mixers {{ {LINEAR} }}"
        f" mixers {{ sasrec {{ num_layers: 1 num_heads: 2 {BLIND} }} }} }} }}",
    ),
}


def model_of(*overrides: str) -> torch.nn.Module:
    pipeline = config.prepare(CONFIG, ["predict.user_store={}", *overrides]).pipeline
    torch.manual_seed(0)
    model = build_model(pipeline).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=1.0 if name.startswith("embed") else 0.3)
    return model


def package_of(model: torch.nn.Module) -> SimpleNamespace:
    """A package of the model, whose programs are not compiled."""
    description = SimpleNamespace(device="cpu", outputs=["is_click", "watch_time"])
    programs = SimpleNamespace(
        pipeline=model.pipeline, items=None, description=description, run=torch.no_grad()(model.score)
    )
    package = parity.with_cache(programs, model)
    extend = package.cached._run_extend

    def without_check(inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """A captured graph does not notice that a truncation drops more than before."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cached_stack, "_require_uncut", lambda *_, **named: None)
            return extend(inputs)

    if extend is not None:
        package.cached._run_extend = without_check
    return package


def without_store(model: torch.nn.Module) -> Predictor:
    package = EagerPackage(model)
    pipeline = type(package.pipeline)()
    pipeline.CopyFrom(package.pipeline)
    pipeline.predict.ClearField("user_store")
    return Predictor(package, pipeline)


@pytest.fixture
def always(monkeypatch):
    """The store is used for batches of every size."""
    monkeypatch.setattr(StoredScores, "_measure", lambda self, size, block: None)


def table_of(rows: list[dict]) -> pa.Table:
    return pa.Table.from_pylist([row | {"request_id": n} for n, row in enumerate(rows)], TABLE.schema)


def assert_equal(actual: pa.Table, expected: pa.Table) -> None:
    for name in ("is_click", "watch_time"):
        got, want = (table[name].combine_chunks() for table in (actual, expected))
        assert got.value_lengths().equals(want.value_lengths())
        np.testing.assert_allclose(got.flatten().to_numpy(), want.flatten().to_numpy(), rtol=2e-5, atol=2e-5)


def changed(row: dict, draw: random.Random) -> dict:
    """The row some time later: mostly with new events, sometimes with others in their place."""
    row = row | {name: list(row[name]) for name in HISTORY}
    match draw.choice([*["append"] * 3, "nothing", "edit", "cut", "forget", "hour", *["later"] * 2]):
        case "append":
            donor, time = draw.choice(ROWS), row["request_time"]
            count = draw.randint(1, 3)
            for name in HISTORY:
                row[name] += donor[name][:count]
            added = (
                len(row["uih_item_id"]) - len(row["uih_timestamps"]) + min(count, len(donor["uih_item_id"]))
            )
            row["uih_timestamps"][-added:] = [time] * added
        case "edit":
            place = draw.randrange(len(row["uih_item_id"]))
            row["uih_item_id"][place] = draw.choice(ROWS)["uih_item_id"][0]
        case "cut":
            row |= {name: row[name][1:] if len(row[name]) > 2 else row[name] for name in HISTORY}
        case "forget":
            row |= {name: row[name][:-1] if len(row[name]) > 2 else row[name] for name in HISTORY}
        case "hour":
            row["hour"] = (row["hour"] + 1) % 24
        case "later":
            row["request_time"] += 10**6
            row["candidate_timestamps"] = [time + 10**6 for time in row["candidate_timestamps"]]
    return row


@pytest.mark.parametrize("form", FORMS)
def test_scores_are_those_of_one_pass_whatever_happens(form, always):
    draw, model = random.Random(form), model_of(*FORMS[form])
    predictor, oracle = Predictor(EagerPackage(model)), without_store(model)
    packaged = Predictor(package_of(model))
    users = draw.sample(ROWS, 8)
    # Users leave and come back: two thirds of them fit.
    for scores in (predictor, packaged):
        scores.table(table_of(users))
        store = scores.stored.store
        store._tiers[0]._most_bytes = store.num_bytes * 2 // 3
    for _ in range(10):
        rows = draw.choices(range(8), k=draw.randint(1, 5))
        for row in rows:
            users[row] = changed(users[row], draw)
        table = table_of([users[row] for row in rows])
        expected = oracle.table(table)
        for scores in (predictor, packaged):
            assert_equal(scores.table(table), expected)
        assert store.num_bytes <= store._tiers[0]._most_bytes
    ways = predictor.stored.rows
    assert packaged.stored.rows == ways
    assert ways[REUSED] > 0 and ways[ENCODED] > 8 and ways[WITHOUT] == 0
    assert (ways[EXTENDED] > 0) == (form not in ("a channel's window", "times between events", "ages"))


def test_a_package_without_the_program_that_extends_encodes_again(always):
    """As packages of earlier versions are, whose description has no `extend`."""
    model = model_of(*FORMS["grows"])
    package, table = package_of(model), table_of(ROWS[:3])
    entry = CachedDescription.of(model).to_json()
    assert entry.pop("extend")
    runs = {"prefill.pt2": package.cached._run_prefill, "cached.pt2": package.cached._run_cached}
    package.cached = CachedPrograms.load(
        CachedDescription(**entry), model.pipeline, lambda name, inputs: runs[name]
    )
    predictor = Predictor(package)
    predictor.table(table_of([row | {name: row[name][:-1] for name in HISTORY} for row in ROWS[:3]]))
    assert_equal(predictor.table(table), without_store(model).table(table))
    assert predictor.stored.rows == {REUSED: 0, EXTENDED: 0, ENCODED: 6}


def test_threads_share_a_store(always):
    model = model_of(*FORMS["grows"])
    predictor, oracle = Predictor(EagerPackage(model)), without_store(model)
    draw, steps = random.Random(4), []
    rows = ROWS[:3]
    for _ in range(12):
        rows = [changed(row, draw) for row in rows]
        steps.append(table_of(rows))
    expected = [oracle.table(table) for table in steps]

    def run(order: range) -> None:
        for number in order:
            assert_equal(predictor.table(steps[number]), expected[number])

    # The same users, with histories that grow in one thread and shrink in the other.
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(run, order) for order in (range(12), range(11, -1, -1))]:
            done.result(60)


def test_new_weights_forget_all_users(always):
    model = recsys.build(recsys.config(CONFIG, ["predict.user_store={}", *FORMS["grows"]]))
    table = table_of(ROWS[:5])
    before = model.score(table)
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            parameter.mul_(0.5 if name.startswith("embed") else 1.5)
    after = model.score(table)
    assert_equal(after, without_store(model.module).table(table))
    assert not before["is_click"].equals(after["is_click"])


def test_files_serve_a_later_process_with_the_same_weights_only(tmp_path, always):
    disk = f'predict.user_store={{host_mib: 0 disk {{folder: "{tmp_path / "users"}"}}}}'
    model, table = model_of(*FORMS["hybrid"], disk), table_of(ROWS[:5])
    expected, weights = without_store(model).table(table), tmp_path / "manifest.json"
    for manifest, way in (("first", ENCODED), ("first", REUSED), ("second", ENCODED)):
        weights.write_text(manifest)
        predictor = Predictor(EagerPackage(model, tmp_path))
        assert_equal(predictor.table(table), expected)
        assert predictor.stored.rows == {REUSED: 0, EXTENDED: 0, ENCODED: 0} | {way: 5}
    with pytest.raises(ConfigError, match="nothing identifies the weights of a model in memory"):
        Predictor(EagerPackage(model))
    weights.with_name("users").rename(tmp_path / "moved")
    weights.with_name("users").write_text("a file")
    with pytest.raises(ConfigError, match=r"user_store.disk.folder: .*users.*; name another folder"):
        Predictor(EagerPackage(model, tmp_path))


def test_equal_rows_without_a_key_share_an_entry(always):
    predictor = Predictor(EagerPackage(model_of()))
    for _ in range(2):
        block = predictor.convert(table_of(ROWS[:2]))
        block.keys = None
        predictor.scores.of(block)
    assert predictor.stored.rows == {REUSED: 2, EXTENDED: 0, ENCODED: 2}


@pytest.mark.parametrize(("slow", "way"), [("_with", WITHOUT), ("_without", REUSED)])
def test_the_faster_way_is_taken_from_the_second_batch_on(slow, way, monkeypatch, caplog):
    predictor, table = Predictor(EagerPackage(model_of())), table_of(ROWS[:2])
    method, calls = getattr(StoredScores, slow), []
    monkeypatch.setattr(StoredScores, slow, lambda self, *given: (calls.append(1), method(self, *given))[1])
    monkeypatch.setattr(stored_scores, "time", SimpleNamespace(perf_counter=lambda: len(calls)))
    with caplog.at_level("INFO"):
        for _ in range(3):
            predictor.table(table)
    assert predictor.stored.rows == {ENCODED: 2, REUSED: 0, EXTENDED: 0} | {way: 4}
    assert f"the store is {'used' if way == REUSED else 'left out'}" in caplog.text
    assert predictor.stored.summary().startswith("user store: rows ")


def test_a_model_without_a_cache_has_no_store(monkeypatch):
    monkeypatch.setattr(LinearDeclaration, "keeps_cache", False)
    with pytest.raises(ConfigError, match="predict.user_store: mixer.linear cannot score with a cache"):
        config.prepare(CONFIG, ["predict.user_store={}", "model.ranker.mixer={linear {qk_dim: 8}}"])
