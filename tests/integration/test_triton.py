"""A model repository for Triton: its layout, and its model under a stand-in for Triton's Python module."""

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.inference import exporter
from recsys.inference.package import Package
from recsys.inference.predictor import Predictor
from recsys.inference.triton_repository import model_config, require_free, write_repository
from tests.integration.runs import command
from tests.modules.pipelines import RETRIEVER, pipeline_of

CONFIG = """\
backend: "python"
max_batch_size: 256
dynamic_batching { max_queue_delay_microseconds: 2000 }
instance_group [ { kind: KIND_CPU count: 1 } ]
input [ { name: "request_time" data_type: TYPE_INT64 dims: [ 1 ] } ]
input [ { name: "uih_item_id" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true } ]
input [ { name: "candidate_item_id" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true } ]
input [ { name: "uih_tag" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true } ]
input [ { name: "uih_tag.counts" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true } ]
input [ { name: "candidate_tag" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true } ]
input [ { name: "candidate_tag.counts" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true } ]
input [ { name: "uih_upload_type" data_type: TYPE_STRING dims: [ -1 ] allow_ragged_batch: true } ]
input [ { name: "candidate_upload_type" data_type: TYPE_STRING dims: [ -1 ] allow_ragged_batch: true } ]
input [ { name: "uih_duration" data_type: TYPE_FP64 dims: [ -1 ] allow_ragged_batch: true } ]
input [ { name: "candidate_duration" data_type: TYPE_FP64 dims: [ -1 ] allow_ragged_batch: true } ]
input [ { name: "tab" data_type: TYPE_INT64 dims: [ 1 ] } ]
input [ { name: "uih_tab" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true } ]
input [ { name: "candidate_tab" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true } ]
input [ { name: "hour" data_type: TYPE_INT64 dims: [ 1 ] } ]
input [ { name: "user_active_degree" data_type: TYPE_STRING dims: [ 1 ] } ]
input [ { name: "uih_timestamps" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true } ]
input [ { name: "uih_actions" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true } ]
input [ { name: "uih_watch_time" data_type: TYPE_FP64 dims: [ -1 ] allow_ragged_batch: true } ]
input [ { name: "candidate_timestamps" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true \
optional: true } ]
output [ { name: "is_click" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "long_view" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "is_like" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "watch_time" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""


class Tensor:
    """The part of Triton's class that models use; it takes what the real one takes."""

    def __init__(self, name: str, values: np.ndarray):
        assert isinstance(values, np.ndarray)
        assert values.dtype in (np.int64, np.float32, np.float64, object), values.dtype
        assert values.dtype != object or all(isinstance(value, bytes) for value in values.flat)
        self._name, self._values = name, values

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._values


class TritonError:
    def __init__(self, message: str):
        self._message = message

    def message(self) -> str:
        return self._message


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor], error: TritonError | None = None):
        self._tensors, self._error = output_tensors, error

    def outputs(self) -> dict[str, np.ndarray]:
        assert self._error is None, self._error.message()
        return {tensor.name(): tensor.as_numpy() for tensor in self._tensors}

    def error(self) -> str:
        assert self._error is not None and not self._tensors
        return self._error.message()


@pytest.fixture
def utils(monkeypatch):
    """Triton's module, which its Python backend puts into the process of a model."""
    module = ModuleType("triton_python_backend_utils")
    for kind in (Tensor, TritonError, InferenceResponse):
        setattr(module, kind.__name__, kind)
    module.get_input_tensor_by_name = lambda request, name: request.get(name)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "recsys.inference.triton_model", raising=False)


def repository_of(package, folder):
    """A repository around a package that is there already."""
    shutil.copytree(package, require_free(folder))
    write_repository(folder)
    return folder / "recommender"


def started(model):
    """An instance of the class in model.py, as Triton makes it."""
    spec = importlib.util.spec_from_file_location("model", model / "1" / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    instance = module.TritonPythonModel()
    instance.initialize({"model_instance_kind": "CPU", "model_instance_device_id": "0"})
    return instance


def request(model, *rows: dict) -> dict[str, Tensor]:
    """Tensors of rows whose lists are equally long: what config.pbtxt asks for."""
    tensors = {}
    for line in (model / "config.pbtxt").read_text().splitlines():
        if not line.startswith("input"):
            continue
        name = line.split('"')[1]
        values = [row[name.removesuffix(".counts")] for row in rows]
        if name.endswith(".counts"):
            values = [[len(inner) for inner in row] for row in values]
        elif values and isinstance(values[0], list) and values[0] and isinstance(values[0][0], list):
            values = [[value for inner in row for value in inner] for row in values]
        elif "dims: [ 1 ]" in line:
            values = [[value] for value in values]
        kind = np.float64 if "FP64" in line else np.int64
        if "STRING" in line:
            values, kind = [[str(value).encode() for value in row] for row in values], object
        tensors[name] = Tensor(name, np.array(values, kind).reshape(len(rows), -1))
    return tensors


def test_requests_of_different_lengths_get_the_answers_of_predict(ranker, tmp_path, utils):
    model = repository_of(ranker.package, tmp_path)
    rows = pq.read_table(ranker.rows).slice(0, 12)
    expected = Predictor(Package(ranker.package)).table(rows).to_pylist()
    rows = rows.to_pylist()
    triton = started(model)
    requests = [request(model, row) for row in rows]
    requests.append(request(model, rows[2], rows[2]))
    del requests[4]["candidate_timestamps"]
    unsorted = dict(request(model, rows[6]))
    times = np.arange(len(rows[6]["uih_timestamps"]))[::-1][None]
    unsorted["uih_timestamps"] = Tensor("uih_timestamps", times.copy())
    ragged = dict(request(model, rows[7]))
    ragged["uih_item_id"] = Tensor("uih_item_id", ragged["uih_item_id"].as_numpy()[:, 1:])
    miscounted = dict(request(model, rows[8]))
    miscounted["uih_tag"] = Tensor("uih_tag", miscounted["uih_tag"].as_numpy()[:, 1:])
    responses = triton.execute([unsorted, *requests, ragged, miscounted])
    assert len(responses) == 16
    assert responses[0].error().startswith("row 0: uih_timestamps")
    length = len(rows[7]["uih_item_id"])
    assert f": {length} values a row where {length - 1} are expected" in responses[-2].error()
    assert responses[-1].error().startswith("uih_tag.counts: the counts of each row must add up to the ")
    for response, row in zip(responses[1:13], expected, strict=True):
        for task, scores in response.outputs().items():
            assert scores.dtype == np.float32
            assert scores[0] == pytest.approx(row[task], rel=1e-6, abs=1e-6)
    for task, scores in responses[13].outputs().items():
        assert scores.tolist() == [pytest.approx(expected[2][task], abs=1e-6)] * 2
    triton.finalize()


def test_recommendations_equal_those_of_predict(retriever, tmp_path, utils):
    model = repository_of(retriever.package, tmp_path)
    rows = pq.read_table(retriever.rows).slice(0, 5)
    expected = Predictor(Package(retriever.package)).table(rows).to_pylist()
    triton = started(model)
    responses = triton.execute([request(model, row) for row in rows.to_pylist()])
    for response, row in zip(responses, expected, strict=True):
        outputs = response.outputs()
        assert outputs["item_id"].tolist() == [row["item_id"]]
        assert outputs["score"][0] == pytest.approx(row["score"], abs=1e-6)


def test_export_writes_a_repository(ranker, tmp_path, monkeypatch):
    def export(source: exporter.ExportSource, folder: Path) -> exporter.Exported:
        """Would compile the same package once more."""
        shutil.copytree(ranker.package, folder)
        return exporter.Exported(folder, 1, 0.0)

    monkeypatch.setattr(exporter, "export", export)
    flags = ("--run-dir", ranker.run, "--output", tmp_path / "models", "--format", "triton")
    said = command("export", *flags)
    assert f"tritonserver --model-repository {tmp_path / 'models'}" in said
    model = tmp_path / "models" / "recommender"
    assert {
        str(path.relative_to(model)) for path in model.rglob("*") if path.suffix in (".py", ".pbtxt", ".pt2")
    } == {
        "config.pbtxt",
        "1/model.py",
        "1/package/model.pt2",
    }
    assert (model / "config.pbtxt").read_text() == CONFIG
    assert "recommender exists: remove it" in command("export", *flags, code=1)


def test_texts_numbers_and_hashed_ids_have_types_of_their_own(tmp_path):
    """Every kind of column, in the text of config.pbtxt."""
    pq.write_table(pa.table({"id": ["a", "b"]}), tmp_path / "item_id.parquet")
    pipeline = pipeline_of(
        RETRIEVER,
        f'data {{ vocabulary_dir: "{tmp_path}" }}',
        'features { name: "city" sides: [USER] id { hash { num_buckets: 9 } embedding_dim: 4 } }',
        'features { name: "age" sides: [USER] numeric { normalize {} } }',
    )
    description = SimpleNamespace(outputs=["query"], device="cuda", max_batch_size=64)
    lines = model_config(pipeline, description).splitlines()
    assert lines[1] == "max_batch_size: 64" and "KIND_GPU" in lines[3]
    for line in (
        'input [ { name: "city" data_type: TYPE_STRING dims: [ 1 ] } ]',
        'input [ { name: "age" data_type: TYPE_FP64 dims: [ 1 ] } ]',
        'input [ { name: "uih_item_id" data_type: TYPE_STRING dims: [ -1 ] allow_ragged_batch: true } ]',
        'output [ { name: "item_id" data_type: TYPE_STRING dims: [ -1 ] } ]',
        'output [ { name: "score" data_type: TYPE_FP32 dims: [ -1 ] } ]',
    ):
        assert line in lines, lines
