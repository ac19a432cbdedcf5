"""Rows of tables begin with the vectors of a parquet file, looked up id by id."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import recsys
from recsys import config
from recsys.data import pretrained_rows
from recsys.data.schema.vocabulary import HashBuckets, mappings
from recsys.data.validation import compare_with_files
from recsys.errors import ConfigError, DataError
from recsys.models import build_model
from recsys.training import pretrained
from recsys.training.state import seed_everything
from tests.integration.runs import CONFIG, train

IDS = pq.read_table("tests/data/kuairand/vocabulary/item_id.parquet")["id"].to_pylist()
WEIGHT = "embed.tables.dim_16.embeddings.item_id_table.weight"


def write(path, ids, vectors, kind=None) -> str:
    """Writes vectors and returns the override that uses them."""
    pq.write_table(pa.table({"item": ids, "v": pa.array(list(vectors), kind)}), path, row_group_size=50)
    return f'features[0].id.init_from={{parquet: "{path}" id_column: "item" vector_column: "v"}}'


def initialized(*overrides: str) -> dict[str, torch.Tensor]:
    pipeline = config.prepare(CONFIG, overrides).pipeline
    seed_everything(1)
    model = build_model(pipeline)
    pretrained.initialize(model.state_dict(), pipeline)
    return model.state_dict()


@pytest.mark.parametrize("kind", [pa.list_(pa.float64()), pa.list_(pa.float32(), 16)])
def test_rows_take_the_vectors_of_their_ids(tmp_path, caplog, kind):
    caplog.set_level("INFO", "recsys")
    chosen = [*IDS[200:], 10**12, *IDS[:100], 10**12 + 1]
    vectors = np.random.default_rng(0).normal(size=(len(chosen), 16)).astype(np.float32)
    override = write(tmp_path / "x.parquet", chosen, vectors, kind)
    plain, actual = initialized(), initialized(override)
    by_id, mapping = (
        dict(zip(chosen, vectors, strict=True)),
        mappings(config.prepare(CONFIG).pipeline)["item_id"],
    )
    for id, row in zip(IDS, mapping.map(pa.array(IDS)).tolist(), strict=True):
        expected = torch.from_numpy(by_id[id]) if id in by_id else plain[WEIGHT][row]
        assert torch.equal(actual[WEIGHT][row], expected)
    assert torch.equal(actual[WEIGHT][0], plain[WEIGHT][0])
    assert all(torch.equal(actual[name], plain[name]) for name in plain if name != WEIGHT)
    assert (
        f"{len(chosen) - 2:,} rows begin with vectors of {tmp_path}/x.parquet, 2 of its ids are not"
        in caplog.text
    )


def test_a_bucket_takes_the_vector_of_its_first_id(tmp_path, caplog):
    caplog.set_level("INFO", "recsys")
    vectors = np.arange(40 * 16, dtype=np.float32).reshape(40, 16)
    override = write(tmp_path / "x.parquet", IDS[:40], vectors)
    actual = initialized("features[0].id={hash {num_buckets: 20}}", override)[WEIGHT]
    buckets = HashBuckets(20).map(pa.array(IDS[:40])).tolist()
    for bucket in set(buckets):
        assert torch.equal(actual[bucket], torch.from_numpy(vectors[buckets.index(bucket)]))
    assert f"{40 - len(set(buckets))} of its ids share a bucket with an earlier one" in caplog.text


@pytest.mark.parametrize(
    ("ids", "vectors", "message"),
    [
        (IDS[:2], [[1.0] * 16, [1.0] * 15], "its vectors have 15 numbers, the table is 16 wide"),
        (IDS[:1] * 2, [[1.0] * 16] * 2, f"id {IDS[0]} is there twice"),
        ([*IDS[:60], IDS[3]], [[1.0] * 16] * 61, f"id {IDS[3]} is there twice"),
        (
            IDS[:2],
            [[1.0] * 16, [1.0] * 15 + [float("inf")]],
            f"the vector of id {IDS[1]} has a number that is not",
        ),
        ([10**12], [[1.0] * 16], "none of its 1 ids is in the vocabulary"),
        (["a"], [[1.0] * 16], "item is string, the ids of .* are int64"),
        ([IDS[0], None], [[1.0] * 16] * 2, "item has nulls between rows 0 and 2"),
        (IDS[:2], [[1.0] * 16, None], "v has nulls"),
        (IDS[:1], [[1] * 16], "v is list<.*int64>; allowed are lists of floating-point numbers"),
    ],
)
def test_what_cannot_be_used_is_an_error_that_says_why(tmp_path, monkeypatch, ids, vectors, message):
    monkeypatch.setattr(pretrained_rows, "_AT_A_TIME", 50)
    override = write(tmp_path / "x.parquet", ids, vectors)
    with pytest.raises(DataError, match=f"{tmp_path}/x.parquet: for table item_id: {message}"):
        initialized(override)


def test_validation_reads_the_columns_and_tables_that_are_shared_agree(tmp_path):
    override = write(tmp_path / "x.parquet", IDS[:1], [[1.0] * 8], pa.list_(pa.float32(), 8))
    (fault,) = compare_with_files(config.prepare(CONFIG, [override]).pipeline).faults
    assert fault.endswith(
        "its vectors have 8 numbers, the table is 16 wide; make id.embedding_dim equal, or reduce the vectors"
    )
    with pytest.raises(
        ConfigError, match=r"features\[1\].id.init_from: none, but features\[0\] of the same table"
    ):
        config.prepare(
            CONFIG, [override, "features[1].id.table='item_id'", "features[0].id.multi_valued=true"]
        )


def test_a_run_begins_with_them_and_a_library_model_too(tmp_path):
    """Both with learning rates near 0, so that the first checkpoint still has the vectors."""
    vectors = np.random.default_rng(1).normal(size=(len(IDS), 16)).astype(np.float32)
    override = write(tmp_path / "x.parquet", IDS, vectors)
    still = ("train.sparse_optimizer.row_wise_adagrad.lr=1e-30", "train.dense_optimizer.adamw.lr=1e-30")
    short = ("train.num_steps=1", "train.schedule.warmup_steps=0", "train.evaluation.every_steps=1")
    assert train(tmp_path / "run", *short, *still, override) == 0
    earlier = f'train.init_from={{path: "{tmp_path}/run" include: "embed.*"}}'
    models = [
        recsys.load(tmp_path / "run"),
        recsys.build(recsys.config(CONFIG, [override])),
        recsys.build(recsys.config(CONFIG, [earlier])),
    ]
    for model in models:
        answer = model.embeddings(feature="item_id")
        actual = dict(zip(answer["id"].to_pylist(), answer["vector"].to_pylist(), strict=True))
        assert all(np.array_equal(np.float32(actual[id]), vectors[i]) for i, id in enumerate(IDS))
    with pytest.raises(ConfigError, match=r"init_from.optimizer: a model without a run has no states"):
        recsys.build(recsys.config(CONFIG, [earlier, "train.init_from.optimizer=true"]))
