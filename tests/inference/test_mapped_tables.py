"""Tables in files of their own: rows bit for bit, or within half a step of their quantization."""

import json

import numpy as np
import pytest
import torch

from recsys import files
from recsys import protos as pb
from recsys.config import checks
from recsys.inference import exporter, mapped_tables
from recsys.inference.exporter import ExportSource
from recsys.inference.mapped_tables import MappedTable, RowInputs, TableEntry, open_tables, write_tables
from recsys.inference.program import PackageError
from recsys.models import build_model
from recsys.modules.embedding import table_of
from recsys.scoring.signature import ScoringGraph, inputs_of, scoring_signature
from tests.modules.pipelines import RANKER, RETRIEVER, batch_of, pipeline_of, random_rows

SIZES = [(3, 2), (0, 1), (5, 0), (1, 4)]


class Trained:
    """A trained table in memory."""

    def __init__(self, weight: torch.Tensor):
        self.weight, (self.rows, self.width) = weight, weight.shape
        self.dtype = np.dtype(str(weight.dtype).removeprefix("torch."))

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.weight[start:stop].numpy()

    def look_up(self, rows: torch.Tensor) -> torch.Tensor:
        return self.weight[rows].float()


def steps_of(rows: np.ndarray, levels: int) -> np.ndarray:
    """The distance of neighboring numbers of each quantized row, in float64."""
    rows = rows.astype(np.float64)
    return (rows.max(1, keepdims=True) - rows.min(1, keepdims=True)) / (levels - 1)


@pytest.mark.parametrize(
    ("dtype", "levels", "rounding"), [(pb.ExportTables.INT8, 256, 1e-6), (pb.ExportTables.INT4, 16, 2e-3)]
)
def test_quantized_rows_are_within_half_a_step(tmp_path, monkeypatch, dtype, levels, rounding):
    """INT4 rounds scale and offset to float16, which has 11 bits."""
    monkeypatch.setattr(mapped_tables, "_BLOCK_BYTES", 1000)
    table = torch.randn(300, 16) * torch.logspace(-2, 1, 300)[:, None]
    table[7] = 0.25
    (mapped,) = write_tables(tmp_path, {"item": Trained(table)}, dtype).values()
    rows = torch.randint(300, (1000,))
    exact = table[rows].numpy()
    error = np.abs(mapped.look_up(rows).numpy() - exact)
    step = steps_of(exact, levels)
    assert (error <= step / 2 + rounding * np.abs(exact).max(1, keepdims=True)).all()
    # Another row's scale, or no quantization at all, would have other errors.
    assert error.max() > 0.4 * step.max()
    assert (tmp_path / "tables" / "item.npy").stat().st_size < (
        0.41 if levels == 256 else 0.21
    ) * table.nbytes


def test_int8_bytes_are_what_fbgemm_documents(tmp_path):
    """The numbers of a row as bytes, then its scale and its smallest number as float32."""
    table = torch.randn(50, 8)
    (mapped,) = write_tables(tmp_path, {"item": Trained(table)}, pb.ExportTables.INT8).values()
    stored = np.load(tmp_path / "tables" / "item.npy")
    scale_and_offset = np.ascontiguousarray(stored[:, 8:]).view(np.float32).astype(np.float64)
    expected = stored[:, :8] * scale_and_offset[:, :1] + scale_and_offset[:, 1:]
    np.testing.assert_allclose(mapped.look_up(torch.arange(50)).numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("text", [RANKER, RETRIEVER])
def test_a_graph_takes_the_rows_that_it_would_look_up(tmp_path, text):
    pipeline = pipeline_of(text)
    model = build_model(pipeline).eval()
    batch = batch_of(pipeline, random_rows(pipeline, SIZES), negatives=[1, 2] if text == RETRIEVER else None)
    inputs, specs = inputs_of(batch, pipeline), scoring_signature(pipeline)
    with torch.no_grad():
        expected = ScoringGraph(model)(*inputs)
        expected_items = model.item_vectors(batch) if text == RETRIEVER else None
    weights = {table_of(name): weight for name, weight in model.state_dict().items() if table_of(name)}
    outside = {name: weights[name] for name in ("item_id", "tags") if name in weights}
    mapped = write_tables(tmp_path, {name: Trained(weight) for name, weight in outside.items()}, 0)
    model.embed.move_outside({name: table.look_up for name, table in mapped.items()})
    kept = {table_of(name) for name in model.state_dict() if table_of(name)}
    assert kept == weights.keys() - outside.keys()
    with torch.no_grad():
        assert torch.equal(ScoringGraph(model)(*inputs), expected)
        if expected_items is not None:
            assert torch.equal(model.item_vectors(batch), expected_items)
    rows = RowInputs(specs, mapped_tables.by_column(pipeline, mapped))
    graph = rows.added_to(ScoringGraph(model), model.embed.outside)
    looked_up = rows.of(inputs)
    assert [tuple(row.shape[1:]) for row in looked_up] == [(int(spec.dims[1]),) for spec in rows.specs]
    model.embed.outside.look_ups.clear()
    with torch.no_grad():
        assert torch.equal(graph(*inputs, *looked_up), expected)


def test_files_that_do_not_fit_are_refused(tmp_path):
    write_tables(tmp_path, {"item": Trained(torch.randn(5, 4))}, 0)
    entry = TableEntry("item", "float32", 5, 4)
    mapped = MappedTable(tmp_path, entry)
    for row in (-1, 5):
        with pytest.raises(PackageError, match=f"rows {row} to {row} were asked for, and .* has rows 0 to 4"):
            mapped.look_up(torch.tensor([row]))
    for wrong in (TableEntry("item", "float32", 6, 4), TableEntry("item", "int8", 5, 4)):
        with pytest.raises(PackageError, match=r"item\.npy: it is float32 \[5, 4\], not .*: export it again"):
            MappedTable(tmp_path, wrong)
    with pytest.raises(PackageError, match="'pickle' is no dtype of a table"):
        MappedTable(tmp_path, TableEntry("item", "pickle", 5, 4))
    # A name that leads out of the package is no file that was checked.
    files.write_manifest(tmp_path)
    assert list(open_tables(tmp_path, [entry])) == ["item"]
    with pytest.raises(PackageError, match=r"\.npy: is not in manifest\.json"):
        open_tables(tmp_path, [TableEntry("../item", "float32", 5, 4)])
    np.save(tmp_path / "tables" / "item.npy", np.array([print], object), allow_pickle=True)
    with pytest.raises(PackageError, match="cannot be read"):
        MappedTable(tmp_path, entry)


def test_the_loss_by_quantization_is_reported(tmp_path):
    pipeline = pipeline_of(RANKER, "export { tables { memory_map_above_bytes: 0  dtype: INT4 } }")
    model = build_model(pipeline).eval()
    batch = batch_of(pipeline, random_rows(pipeline, SIZES * 9))
    metrics = model.metrics()
    with torch.no_grad():
        model.update_metrics(metrics, model(batch), batch)
    weights = {
        table_of(name): Trained(weight) for name, weight in model.state_dict().items() if table_of(name)
    }
    model.embed.move_outside({name: table.look_up for name, table in weights.items()})
    exporter._write_tables(ExportSource(pipeline, model, 1, [batch], weights), tmp_path)
    report = json.loads((tmp_path / exporter.QUANTIZATION).read_text())
    assert report["dtype"] == "INT4" and report["rows"] == len(batch.uih_lengths)
    for name, values in report["metrics"].items():
        assert values["trained"] == pytest.approx(float(metrics[name].compute()), abs=1e-6)
    assert 0 < abs(report["metrics"]["seconds/mae"]["package"] - float(metrics["seconds/mae"].compute())) < 1


def test_int4_needs_widths_of_whole_bytes():
    pipeline = pipeline_of(RANKER, "export { tables { memory_map_above_bytes: 0  dtype: INT4 } }")
    assert not [x for x in checks.findings(pipeline) if x.path.startswith("export")]
    pipeline.features[2].id.embedding_dim = 6
    (finding,) = [x for x in checks.findings(pipeline) if x.path == "export.tables.dtype"]
    assert "a multiple of 4, and item_id has 6 columns; use INT8" in finding.text
    pipeline.export.tables.memory_map_above_bytes = 10**6
    assert not [x for x in checks.findings(pipeline) if x.path.startswith("export")]
