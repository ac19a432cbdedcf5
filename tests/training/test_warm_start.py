"""A new run takes weights by name, and rows of tables by id, against a search for each id by hand."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recsys import config
from recsys.data.schema.carry_over import NONE, CarryOver
from recsys.data.schema.vocabulary import Buckets, HashBuckets, Vocabulary, mappings
from recsys.errors import ConfigError, DataError
from recsys.training.distributed import process_group
from recsys.training.session import open_session
from tests.integration.runs import CONFIG, evaluate, tensors, train

SHORT = ("train.num_steps=2", "train.schedule.warmup_steps=0", "train.evaluation.every_steps=2")
ITEMS = "model.embed.tables.dim_16.embeddings.item_id_table.weight"
MOMENTS = f"optimizer.{ITEMS}.item_id_table.momentum1"
GONE, NEW = 20, [10**12 + 1, 10**12 + 2, 10**12 + 3]
"""Ids of the old vocabulary that the new one lacks, and ids that it adds."""


@pytest.fixture(scope="module")
def old(tmp_path_factory) -> Path:
    """A run with averages, which trained two steps."""
    folder = tmp_path_factory.mktemp("warm") / "old"
    assert train(folder, *SHORT, "train.weight_averaging={ema {decay: 0.5}}") == 0
    return folder


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory) -> Path:
    """The vocabularies, with items in the opposite order, without the last ones, and with new ones."""
    folder = tmp_path_factory.mktemp("vocabulary") / "new"
    shutil.copytree("tests/data/kuairand/vocabulary", folder)
    ids = pq.read_table(folder / "item_id.parquet")["id"].to_pylist()
    pq.write_table(pa.table({"id": NEW + ids[:-GONE][::-1]}), folder / "item_id.parquet")
    return folder


def opened(folder: Path, *overrides: str) -> dict[str, torch.Tensor]:
    """The tensors of a run before its first step."""
    pipeline = config.prepare(CONFIG, [*SHORT, *overrides]).pipeline
    folder.mkdir(exist_ok=True)
    with process_group() as processes:
        session = open_session(pipeline, folder, processes)
        path = session.save()
        del session
    return tensors(path)


def take(old: Path, more: str = "") -> str:
    return f'train.init_from={{path: "{old}" {more}}}'


def rows_of(vocabulary_dir: str | Path) -> dict[int, int]:
    """The row of each item's id."""
    pipeline = config.prepare(CONFIG, [f"data.vocabulary_dir={vocabulary_dir}"]).pipeline
    ids = pq.read_table(Path(vocabulary_dir) / "item_id.parquet")["id"]
    rows = mappings(pipeline)["item_id"].map(ids.combine_chunks().cast(pa.int64()))
    return dict(zip(ids.to_pylist(), rows.tolist(), strict=True))


def test_rows_are_carried_over_by_id_and_the_head_is_left_out(tmp_path, old, vocabulary):
    place = f"data.vocabulary_dir={vocabulary}"
    initial = opened(tmp_path / "initial", place)
    warm = opened(tmp_path / "warm", place, take(old, 'exclude: "head.*" optimizer: true'))
    before = tensors(old / "checkpoints" / "step-00000002")
    then, now = rows_of("tests/data/kuairand/vocabulary"), rows_of(vocabulary)
    assert now.keys() - then.keys() == set(NEW) and len(then.keys() - now.keys()) == GONE
    for name in (ITEMS, MOMENTS):
        for id, row in now.items():
            expected = before[name][then[id]] if id in then else initial[name][row]
            assert torch.equal(warm[name][row], expected)
        assert torch.equal(warm[name][0], before[name][0])
    for name, tensor in warm.items():
        if name not in (ITEMS, MOMENTS):
            source = initial if "model.head." in name else before
            assert torch.equal(tensor, source[name]), name
    report = json.loads((tmp_path / "warm" / "init_from.json").read_text())
    carried = len(now.keys() & then.keys())
    assert report["tables"] == {"item_id": {"carried": carried, "initial": 3, "before": len(then)}}
    assert report["excluded"] == sorted(
        n.removeprefix("model.") for n in initial if n.startswith("model.head")
    )
    assert report["missing"] == report["unused"] == [] and report["batches"] == 2


def test_without_states_the_weights_are_those_that_evaluation_uses(tmp_path, old):
    before = tensors(old / "checkpoints" / "step-00000002")
    warm = opened(tmp_path, take(old, 'checkpoint: "2"'))
    name = "mix.layers.0.uvqk.weight"
    assert not torch.equal(before[f"model.{name}"], before[f"average.{name}"])
    for parameter in (n for n in warm if n.startswith("model.")):
        assert torch.equal(warm[parameter], before[parameter.replace("model.", "average.", 1)])
    assert not any(warm[n].any() for n in warm if n.endswith("exp_avg"))


def test_a_table_may_be_placed_otherwise_now(tmp_path, old):
    """Row 1 + i of a replicated table is that of the vocabulary's id i."""
    before = tensors(old / "checkpoints" / "step-00000002")[ITEMS.replace("model.", "average.", 1)]
    warm = opened(tmp_path, take(old), "model.embedding.placement=REPLICATED")
    rows = [0, *rows_of("tests/data/kuairand/vocabulary").values()]
    assert torch.equal(warm[ITEMS], before[rows]) and rows != sorted(rows)


def test_names_on_one_side_only_are_reported_and_a_resumed_run_is_not_warm(tmp_path, old, caplog):
    caplog.set_level("INFO", "recsys")
    smaller = (
        "model.ranker.head={mmoe {num_experts: 2 expert_dim: 8}}",
        take(old / "checkpoints/step-00000002"),
    )
    assert train(tmp_path / "new", *SHORT, *smaller) == 0
    report = json.loads((tmp_path / "new" / "init_from.json").read_text())
    assert all(name.startswith("head.") for name in report["missing"] + report["unused"])
    assert "head.mlp.0.weight" in report["unused"] and report["missing"]
    assert "in the checkpoint but not in the model: 4: head.mlp.0.bias, head.mlp.0.weight" in caplog.text
    (tmp_path / "new" / "init_from.json").unlink()
    assert train(tmp_path / "new", *SHORT, *smaller, "train.num_steps=3") == 0
    assert not (tmp_path / "new" / "init_from.json").exists()


@pytest.mark.parametrize(
    ("overrides", "more", "message"),
    [
        (
            ["model.ranker.mixer.hstu.num_heads=4"],
            "",
            "mix.layers.0.uvqk.weight: [64, 16] in the checkpoint, [128, 16] in this model. Make them equal, "
            'or leave it out with exclude: "mix.layers.0.uvqk.weight"',
        ),
        (
            ["features[2].id.embedding_dim=12"],
            "",
            "dim_12.embeddings.hour_table.weight: [25, 8] in the checkpoint, [25, 12] in this model",
        ),
        (
            ["features[2].id={hash {num_buckets: 10} embedding_dim: 8}"],
            'include: "embed.*" exclude: "heads.*"',
            "train.init_from.exclude[0]: 'heads.*' matches none of the 23 names. Did you mean head.*?",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_with_a_remedy(tmp_path, old, overrides, more, message):
    with pytest.raises(ConfigError) as caught:
        opened(tmp_path, *overrides, take(old, more))
    assert message in str(caught.value)


def test_a_vocabulary_is_kept_in_the_run_folder_and_missed_if_it_is_gone(tmp_path, old, vocabulary):
    """The file that the old config names is replaced, as a new preparation would do it."""
    then = tmp_path / "vocabulary"
    shutil.copytree("tests/data/kuairand/vocabulary", then)
    assert train(tmp_path / "old", *SHORT, f"data.vocabulary_dir={then}") == 0
    shutil.rmtree(then)
    shutil.copytree(vocabulary, then)
    warm = opened(tmp_path / "warm", f"data.vocabulary_dir={then}", take(tmp_path / "old"))
    before = tensors(tmp_path / "old" / "checkpoints" / "step-00000002")
    id = next(iter(rows_of(then).keys() - set(NEW)))
    there = rows_of("tests/data/kuairand/vocabulary")[id]
    assert torch.equal(warm[ITEMS][rows_of(then)[id]], before[ITEMS][there])
    (tmp_path / "old" / "vocabulary" / "item_id.parquet").unlink()
    with pytest.raises(ConfigError, match="the vocabulary of item_id with which .* nobody knows which ids"):
        opened(tmp_path / "again", f"data.vocabulary_dir={then}", take(tmp_path / "old"))


def test_validate_finds_the_checkpoint_and_a_path_without_one_is_an_error(old, capsys):
    from recsys import train as command

    def validate(path: Path) -> int:
        flags = ["--config", CONFIG, "--validate", "--set", take(path)]
        return command.main(flags)

    assert validate(old) == 0
    assert f"train.init_from: {old}/checkpoints/step-00000002\nok" in capsys.readouterr().out
    assert validate(old / "vocabulary") == 2
    assert "vocabulary is neither the folder of a run nor of a checkpoint" in capsys.readouterr().err


def test_a_run_that_started_warm_is_evaluated_without_the_old_one(tmp_path, old):
    shutil.copytree(old, tmp_path / "old")
    assert train(tmp_path / "new", *SHORT, take(tmp_path / "old")) == 0
    shutil.rmtree(tmp_path / "old")
    assert evaluate("--run-dir", str(tmp_path / "new"), "--split", "validation") == 0


def vocabulary_of(ids: list, table: str | None = None) -> Vocabulary:
    return Vocabulary(pa.array(ids), name="v", table=table)


@pytest.mark.parametrize("sharded", ["t", None])
def test_rows_of_a_table_that_is_not_sharded_are_found_in_one_that_is(sharded):
    before, now = vocabulary_of(["a", "b", "c", "d"]), vocabulary_of(["d", "x", "b"], sharded)
    actual = CarryOver("t", before, now).sources(np.arange(4))
    by_id = dict(zip(now.original(np.arange(4)).to_pylist(), actual.tolist(), strict=True))
    assert by_id == {None: 0, "d": 4, "x": NONE, "b": 2}


def test_ids_take_the_row_of_their_bucket_and_buckets_that_of_their_most_frequent_id():
    ids, hashed = list(range(100, 140)), HashBuckets(7)
    bucket = {id: int(hashed.map(pa.array([id]))[0]) for id in ids}
    actual = CarryOver("t", hashed, vocabulary_of(ids)).sources(np.arange(41))
    assert actual.tolist() == [NONE, *(bucket[id] for id in ids)]
    actual = CarryOver("t", vocabulary_of(ids[:5]), hashed).sources(np.arange(7))
    first = {b: next((i + 1 for i, id in enumerate(ids[:5]) if bucket[id] == b), NONE) for b in range(7)}
    assert actual.tolist() == [first[b] for b in range(7)]
    assert NONE in first.values() and len(set(first.values())) > 2


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (HashBuckets(7), HashBuckets(8), "it was 7 hash buckets and is 8 hash buckets"),
        (Buckets([1.0]), Buckets([2.0]), "it was 2 buckets of numbers and is 2 buckets of numbers"),
        (vocabulary_of([1]), vocabulary_of(["1"]), "were integers in v and are strings in v"),
    ],
)
def test_rows_that_no_id_finds_are_an_error(before, now, message):
    with pytest.raises(DataError, match=message):
        CarryOver("t", before, now)
