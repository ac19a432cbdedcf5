"""Plans of tables: the config's demands, the planner's choices, files, and the memory that they need."""

import json
from dataclasses import replace

import pytest
import torch
from torchrec import EmbeddingCollection

from recsys import config
from recsys import protos as pb
from recsys.errors import ConfigError
from recsys.models import build_model
from recsys.training import memory
from recsys.training.distributed import Processes
from recsys.training.sharding_plan import Plan, TablePlan, ids_per_row, make_plan, read_plan

CONFIG = "tests/integration/tiny.config"
GIBI = 2**30


def prepare(*overrides: str) -> pb.Pipeline:
    return config.prepare(CONFIG, overrides).pipeline


def planned(pipeline: pb.Pipeline, world_size: int = 4, device: str = "cpu", room: int = GIBI) -> Plan:
    return make_plan(build_model(pipeline), pipeline, world_size, device, room)


def by_name(plan: Plan) -> dict[str, TablePlan]:
    return {table.table: table for table in plan.tables}


def test_each_table_is_divided_as_its_entry_says():
    tables = by_name(
        planned(
            prepare(
                "train.sparse_optimizer={adagrad {}}",
                'train.sharding.tables=[{table: "tag" kind: TABLE_WISE}, {table: "hour" kind: COLUMN_WISE}]',
            )
        )
    )
    assert tables["item_id"] == TablePlan("item_id", 616, 16, "FP32", "ROW_WISE", "FUSED", None, [0, 1, 2, 3])
    assert tables["tag"].sharding == "TABLE_WISE"
    assert len(tables["tag"].ranks) == 1
    # 8 columns make two shards of 4, the least that FBGEMM moves.
    assert tables["hour"].sharding == "COLUMN_WISE"
    assert len(tables["hour"].ranks) == 2


def test_parts_of_a_table_add_up_to_the_table():
    plan = planned(
        prepare(
            "train.sparse_optimizer={adagrad {}}",
            'train.sharding.tables=[{table: "tag" kind: TABLE_WISE}, {table: "item_id" kind: COLUMN_WISE}]',
        ),
        world_size=3,
    )
    for table in plan.tables:
        parts = sum(table.rows_on(rank) * table.columns_on(rank) for rank in range(3))
        assert parts == table.rows * table.width


def test_the_planner_puts_a_table_that_exceeds_device_memory_into_host_memory():
    overrides = (
        "train.sharding={kind: TABLE_WISE kernel: AUTO}",
        "features[0].id={hash {num_buckets: 1000000}}",
    )
    item = by_name(planned(prepare(*overrides), 1, "cuda", 2 * GIBI))["item_id"]
    assert (item.kernel, item.cache_load_factor) == ("FUSED", None)
    # 1,000,000 x 16 float32 are 64 MB; a cache of a fifth of them fits beside the other tables.
    item = by_name(planned(prepare(*overrides), 1, "cuda", 50_000_000))["item_id"]
    assert (item.kernel, item.cache_load_factor) == ("FUSED_UVM_CACHING", 0.2)


def test_no_division_fits_is_said_with_the_remedy():
    overrides = ("train.sharding.kind=AUTO", "features[0].id={hash {num_buckets: 1000000}}")
    with pytest.raises(
        ConfigError, match=r"^train.sharding: TorchRec's planner .* over 4 ranks .*table_prec"
    ):
        planned(prepare(*overrides), room=1_000_000)


def test_a_written_plan_is_read_again(tmp_path):
    pipeline = prepare('train.sharding.tables=[{table: "tag" kind: TABLE_WISE}]')
    plan = planned(pipeline)
    plan.write(tmp_path)
    assert read_plan(str(tmp_path / "sharding_plan.json"), build_model(pipeline), pipeline, 4) == plan


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        ({"rows": 617}, "table 'item_id': 617 x 16 FP32 in the file, 616 x 16 FP32 in the config"),
        ({"ranks": [0, 1, 2]}, "table 'item_id': sharding ROW_WISE over ranks [0, 1, 2]; allowed are"),
        ({"sharding": "GRID_WISE"}, "sharding GRID_WISE over ranks"),
        ({"sharding": "TABLE_WISE", "ranks": [4]}, "ranks [4] are not all among 0 to 3"),
        ({"sharding": "COLUMN_WISE", "ranks": [0]}, "would split the state that row_wise_adagrad has"),
        ({"kernel": "SSD"}, "kernel SSD; allowed are FUSED"),
        ({"cache_load_factor": 0.5}, "cache_load_factor belongs to FUSED_UVM_CACHING"),
        ({"table": "tiem"}, "names 'tiem', which is no sharded table"),
        ({"table": "tiem"}, "does not name the sharded table 'item_id'"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(tmp_path, change, finding):
    pipeline = prepare()
    plan = planned(pipeline)
    Plan(4, [replace(plan.tables[0], **change), *plan.tables[1:]]).write(tmp_path)
    with pytest.raises(ConfigError) as caught:
        read_plan(str(tmp_path / "sharding_plan.json"), build_model(pipeline), pipeline, 4)
    assert any(finding in line for line in caught.value.findings)


def test_a_plan_for_another_number_of_processes_or_no_plan_is_refused(tmp_path):
    pipeline = prepare()
    planned(pipeline).write(tmp_path)
    path = tmp_path / "sharding_plan.json"
    with pytest.raises(ConfigError, match="is made for 4 processes, and this run has 2"):
        read_plan(str(path), build_model(pipeline), pipeline, 2)
    path.write_text(json.dumps({"world_size": 4}))
    with pytest.raises(ConfigError, match=r"cannot be read as a plan .*tables"):
        read_plan(str(path), build_model(pipeline), pipeline, 4)
    with pytest.raises(ConfigError, match="cannot be read as a plan"):
        read_plan(str(tmp_path / "none"), build_model(pipeline), pipeline, 4)


@pytest.mark.parametrize(
    ("precision", "optimizer", "row_bytes"),
    [
        ("FP32", "row_wise_adagrad {}", 64 * 4 + 4),
        ("FP16", "row_wise_adagrad {}", 64 * 2 + 4),
        ("FP32", "adagrad {}", 64 * 4 * 2),
        ("FP32", "adam {}", 64 * 4 * 3),
        ("FP32", "partial_row_wise_adam {}", 64 * 4 * 2 + 4),
        ("FP32", "sgd {}", 64 * 4),
    ],
)
def test_memory_is_rows_and_optimizer_states(precision, optimizer, row_bytes):
    table = TablePlan("t", 1_000_000, 64, precision, "ROW_WISE", "FUSED", None, [0, 1])
    pipeline = prepare(f"train.sparse_optimizer={{{optimizer}}}")
    assert memory.table_memory(table, 1, pipeline.train).device == 500_000 * row_bytes
    cached = replace(table, kernel="FUSED_UVM_CACHING", cache_load_factor=0.1)
    actual = memory.table_memory(cached, 0, pipeline.train)
    assert actual.host == 500_000 * row_bytes
    weights = 500_000 * 64 * (2 if precision == "FP16" else 4)
    assert actual.device == weights // 10 + 4 * 500_000


def test_too_little_memory_names_the_table_and_the_remedy(monkeypatch):
    model = build_model(prepare("features[0].id={hash {num_buckets: 300000}}"), whole=False)
    plan = planned(model.pipeline, 1)
    processes = Processes(0, 1, torch.device("cpu"))
    # 300,000 rows of 16 numbers and an accumulator are 20,400,000 bytes; the other weights are some 60 kB.
    monkeypatch.setattr(memory, "_free_host_memory", lambda: 20_500_000)
    memory.require_room(model, plan, model.pipeline, processes)
    monkeypatch.setattr(memory, "_free_host_memory", lambda: 20_399_999)
    with pytest.raises(ConfigError) as caught:
        memory.require_room(model, plan, model.pipeline, processes)
    message = str(caught.value)
    assert message.startswith("rank 0 needs 0.019 GiB of memory on cpu and has 0.019 GiB")
    assert "table item_id 0.018 GiB (ROW_WISE, FUSED) and 0.001 GiB of optimizer states" in message
    assert "model.embedding.table_precision: FP16" in message


def test_the_plan_is_shown_as_a_table():
    pipeline = prepare('train.sharding.tables=[{table: "tag" kind: TABLE_WISE}]')
    head, item, tag, _ = memory.describe(planned(pipeline, 2), pipeline)
    assert head.split("  ")[0] == "table"
    # 16 rows of 20 events and 5 candidates; a table on one rank answers both ranks.
    assert item.split()[:6] == ["item_id", "616", "16", "FP32", "ROW_WISE", "all"]
    assert item.split()[-1] == "400"
    assert tag.split()[-1] == "800"


def test_shared_items_count_once_for_each_batch():
    pipeline = config.prepare("configs/movielens_small_retrieval.config", ["data.batch_size=10"]).pipeline
    (item,) = [feature.id.vocabulary.size for feature in pipeline.features if feature.name == "item_id"]
    assert ids_per_row(pipeline)["negatives"] == item / 10


def test_replicated_tables_are_not_in_the_plan():
    pipeline = prepare('model.embedding.tables=[{table: "hour" placement: REPLICATED}]')
    model = build_model(pipeline)
    assert set(by_name(planned(pipeline))) == {"item_id", "tag"}
    assert {key for key, m in model.embed.tables.items() if isinstance(m, EmbeddingCollection)} == {
        "dim_16",
        "dim_8_replicated",
    }
