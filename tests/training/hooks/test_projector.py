"""Vectors of the most frequent items with original ids and names."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recsys import protos as pb
from recsys.data.schema.vocabulary import mappings
from recsys.models import build_model
from recsys.training.hooks import projector
from recsys.training.hooks.projector import frequent_items
from tests.modules.pipelines import RANKER, RETRIEVER, pipeline_of

IDS = list(range(300, 320))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "vocabulary").mkdir()
    return tmp_path


def retriever(folder, ids=IDS) -> pb.Pipeline:
    path = folder / "vocabulary/item_id.parquet"
    pq.write_table(pa.table({"id": ids, "count": list(range(len(ids), 0, -1))}), path)
    pipeline = pipeline_of(RETRIEVER)
    pipeline.features[0].id.vocabulary.file = str(path)
    return pipeline


def weights(pipeline: pb.Pipeline) -> dict[str, torch.Tensor]:
    return build_model(pipeline).state_dict()


def test_rows_behind_the_unknown_one_with_ids_and_names(folder):
    # Names in another order than the vocabulary's, and of more items than it has.
    names = pa.table({"id": [301, 999, 300], "name": ["Jumanji", "Nobody", "Toy Story"]})
    pq.write_table(names, folder / "names.parquet")
    pipeline = retriever(folder)
    actual = weights(pipeline)
    items = frequent_items(pipeline, actual, limit=3)
    assert items.ids == ["300", "301", "302"]
    assert items.names == ["Toy Story", "Jumanji", ""]
    table = actual["embed.tables.dim_8.embeddings.item_id_table.weight"]
    assert torch.equal(items.vectors, table[rows_of(pipeline, [300, 301, 302])])


def rows_of(pipeline: pb.Pipeline, ids: list[int]) -> torch.Tensor:
    """Rows of the table that the reader assigns to ids."""
    return torch.from_numpy(mappings(pipeline)["item_id"].map(pa.array(ids)))


@pytest.mark.parametrize("placement", [pb.Embedding.SHARDED, pb.Embedding.REPLICATED])
@pytest.mark.parametrize("first", [0, 7, 14, 40])
def test_of_a_cut_table_this_ranks_part(folder, monkeypatch, placement, first):
    pipeline = retriever(folder)
    pipeline.model.embedding.placement = placement
    whole = weights(pipeline)
    (name,) = (name for name in whole if name.endswith("item_id_table.weight"))
    part = projector._Part(first, whole[name][first : first + 7])
    monkeypatch.setattr(projector, "_part", lambda weight: part)
    items = frequent_items(pipeline, whole, limit=5)
    rows = rows_of(pipeline, IDS[:5]).tolist()
    here = [(str(item), row) for item, row in zip(IDS, rows, strict=False) if first <= row < first + 7]
    if not here:
        assert items is None
        return
    assert items.ids == [item for item, _ in here]
    assert torch.equal(items.vectors, whole[name][[row for _, row in here]])


def test_a_small_catalogue_is_shown_whole_and_ids_may_be_text(folder):
    pipeline = retriever(folder, [f"v{i}" for i in range(20)])
    items = frequent_items(pipeline, weights(pipeline))
    assert items.ids == [f"v{i}" for i in range(20)] and items.vectors.shape == (20, 8)
    assert items.names == [""] * 20


@pytest.mark.parametrize("content", [b"no parquet", None], ids=["broken", "other columns"])
def test_names_that_cannot_be_used_are_left_out(folder, caplog, content):
    if content is None:
        pq.write_table(pa.table({"item": [300]}), folder / "names.parquet")
    else:
        (folder / "names.parquet").write_bytes(content)
    pipeline = retriever(folder)
    assert frequent_items(pipeline, weights(pipeline), limit=2).names == ["", ""]
    assert "names.parquet: no names are taken from it" in caplog.text


def test_of_a_ranker_the_first_vocabulary_of_a_candidate_is_the_item(folder):
    pipeline = pipeline_of(RANKER)
    path = folder / "vocabulary/item_id.parquet"
    pq.write_table(pa.table({"id": IDS}), path)
    pipeline.features[2].id.vocabulary.file = str(path)
    assert frequent_items(pipeline, weights(pipeline), limit=2).ids == ["300", "301"]
    del pipeline.features[2]
    assert frequent_items(pipeline, weights(pipeline), limit=2) is None
