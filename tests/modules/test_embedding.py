import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingCollection
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embedding import EmbeddingCollectionSharder

from recsys import protos as pb
from recsys.modules.embedding import EmbeddingGroup
from tests.modules.pipelines import RANKER, RETRIEVER, batch_of, pipeline_of, random_rows

SIZES = [(3, 2), (0, 1), (5, 0), (1, 4)]


def weight(group, table):
    key = f"{table}_table"
    (only,) = (tables.embeddings[key].weight for tables in group.tables.values() if key in tables.embeddings)
    return only.detach()


def entries(rows, name):
    """The ids of a column, one a row, event or candidate."""
    actual = [row.values[name] for row in rows]
    return actual if name == "gender" else [entry for row in actual for entry in row]


@pytest.mark.parametrize("pooling", [pb.SUM, pb.MEAN])
def test_each_column_is_a_lookup_and_multi_valued_ones_are_pooled(pooling):
    pipeline = pipeline_of(RANKER)
    pipeline.features[3].id.pooling = pooling
    rows = random_rows(pipeline, SIZES)
    group = EmbeddingGroup(pipeline)
    actual = group(batch_of(pipeline, rows))
    ages = torch.tensor([[row.values["age"]] for row in rows])
    prices = torch.tensor([[price] for row in rows for price in row.values["candidate_price"]])
    torch.testing.assert_close(actual.pop("age"), ages)
    torch.testing.assert_close(actual.pop("candidate_price"), prices)
    assert set(actual) == {"gender", "uih_item_id", "candidate_item_id", "uih_tags", "candidate_tags"}
    for name, vectors in actual.items():
        table = weight(group, name.removeprefix("uih_").removeprefix("candidate_"))
        expected = []
        for entry in entries(rows, name):
            if isinstance(entry, int):
                expected.append(table[entry])
                continue
            total = sum((table[i] for i in entry), torch.zeros(4))
            expected.append(total / max(1, len(entry)) if pooling == pb.MEAN else total)
        torch.testing.assert_close(vectors.detach(), torch.stack(expected))


def test_negatives_are_looked_up_in_the_item_table():
    pipeline = pipeline_of(RETRIEVER)
    group = EmbeddingGroup(pipeline)
    actual = group(batch_of(pipeline, random_rows(pipeline, SIZES), negatives=[7, 3, 7]))
    torch.testing.assert_close(actual["negatives"].detach(), weight(group, "item_id")[[7, 3, 7]])


def test_tables_start_normal_and_the_same_for_a_seed():
    pipeline = pipeline_of(RETRIEVER)
    pipeline.features[0].id.vocabulary.size = 5000

    def start(seed):
        torch.manual_seed(seed)
        return weight(EmbeddingGroup(pipeline), "item_id")

    table = start(1)
    assert table.shape == (5001, 8)
    # 40,000 draws: the standard deviation is known to 0.35 %.
    assert table.std().item() == pytest.approx(0.5, rel=0.02)
    assert abs(table.mean().item()) < 0.02
    assert torch.equal(table, start(1))
    assert not torch.equal(table, start(2))


def test_a_collection_for_each_width():
    group = EmbeddingGroup(pipeline_of(RANKER))
    assert {name: sorted(tables.embeddings) for name, tables in group.tables.items()} == {
        "dim_4": ["gender_table", "tags_table"],
        "dim_8": ["item_id_table"],
    }


class SumOfColumns(nn.Module):
    """A model around the group, as TorchRec's pipeline sees one: loss and a second output."""

    def __init__(self, pipeline):
        super().__init__()
        self.embed = EmbeddingGroup(pipeline)
        self.total = Total()

    def forward(self, batch):
        return self.total(self.embed(batch))


class Total(nn.Module):
    def forward(self, columns):
        total = sum(column.square().sum() for column in columns.values())
        return total, total.detach()


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_torchrecs_pipeline_takes_the_lookup_ahead(one_process):
    pipeline = pipeline_of(RANKER)
    model = SumOfColumns(pipeline)
    batches = [batch_of(pipeline, random_rows(pipeline, SIZES, seed=seed)) for seed in range(4)]
    expected = [model(batch)[1].item() for batch in batches]
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.0}
    sharded = DistributedModelParallel(
        model, device=torch.device("cpu"), sharders=[EmbeddingCollectionSharder(fused_params=fused)]
    )
    assert not any(isinstance(module, EmbeddingCollection) for module in sharded.modules())
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
    ahead = TrainPipelineSparseDist(sharded, optimizer, torch.device("cpu"), execute_all_batches=True)
    stream = iter(batches)
    actual = [ahead.progress(stream).item() for _ in batches]
    assert len(ahead._pipelined_modules) == 2
    # The weights survived sharding, and every batch met its own lookups.
    assert actual == pytest.approx(expected, rel=1e-6)
