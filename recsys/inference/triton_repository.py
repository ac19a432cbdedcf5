"""Writes a model repository for Triton Inference Server around a package.

    REPOSITORY/recommender/config.pbtxt   inputs, outputs, dynamic batching
    REPOSITORY/recommender/1/model.py     a class for Triton's Python backend
    REPOSITORY/recommender/1/package/     the package

Triton's PyTorch backend loads TorchScript, not programs of AOTInductor, and maps no ids, so the Python
backend runs the package. Each row of a request has the columns of `recsys predict` as tensors.
"""

from pathlib import Path

from recsys import files
from recsys import protos as pb
from recsys.config import features
from recsys.config.declarations import model_of
from recsys.config.feature_kinds import Values
from recsys.data.arrow import is_text as is_text_type
from recsys.data.schema.contract import FileColumn, file_columns
from recsys.data.schema.vocabulary import id_type
from recsys.errors import RecsysError
from recsys.inference.package import Description, Package

MODEL, VERSION, PACKAGE = "recommender", "1", "package"

COUNTS = ".counts"
"""Suffix of the input with the number of values of each element of a multi-valued column."""

NO_SCORE = float("-inf")
"""Score of a place without an item, in a row with fewer items than others of its request."""

DELAY_US = 2000
"""Time in microseconds that Triton holds a request back to batch it with others."""

MODEL_PY = '''"""Scores rows with the package beside this file; Triton's Python needs recsys."""

from pathlib import Path

from recsys.inference.triton_model import RecsysModel


class TritonPythonModel(RecsysModel):
    package = Path(__file__).parent / "package"
'''


def require_free(repository: Path) -> Path:
    """Returns the folder of a package in a repository that has no such model yet.

    Raises:
        RecsysError: the repository has a model of that name.
    """
    model = repository / MODEL
    if model.exists():
        raise RecsysError(f"{model} exists: remove it, or give another --output")
    return model / VERSION / PACKAGE


def write_repository(repository: Path) -> None:
    """Writes the files around the package that is already in `require_free`'s folder."""
    model = repository / MODEL
    package = Package(model / VERSION / PACKAGE)
    files.write_text(model / VERSION / "model.py", MODEL_PY)
    files.write_text(model / "config.pbtxt", model_config(package.pipeline, package.description))


def model_config(pipeline: pb.Pipeline, description: Description) -> str:
    """Returns the text of `config.pbtxt`."""
    searches = model_of(pipeline).item_feature is not None
    kind = "KIND_GPU" if description.device == "cuda" else "KIND_CPU"
    inputs = [entry for column in file_columns(pipeline, "predict") for entry in _inputs(column)]
    outputs = [_entry(name, "TYPE_FP32", "-1") for name in description.outputs]
    if searches:
        searched = features.searched_item(pipeline)
        text = is_text_type(id_type(searched.id.vocabulary.file))
        outputs = [
            _entry(searched.name, "TYPE_STRING" if text else "TYPE_INT64", "-1"),
            _entry(features.SCORE, "TYPE_FP32", "-1"),
        ]
    return "\n".join(
        [
            'backend: "python"',
            f"max_batch_size: {min(pipeline.predict.batch_size, description.max_batch_size)}",
            f"dynamic_batching {{ max_queue_delay_microseconds: {DELAY_US} }}",
            f"instance_group [ {{ kind: {kind} count: 1 }} ]",
            *(f"input [ {{ {entry} }} ]" for entry in inputs),
            *(f"output [ {{ {entry} }} ]" for entry in outputs),
            "",
        ]
    )


def is_text(column: FileColumn) -> bool:
    """Returns whether a column holds texts: ids of a vocabulary of texts, and all hashed ids."""
    return Values.TEXT in column.values


def _inputs(column: FileColumn) -> list[str]:
    """Returns the inputs of a column: its values and, if an element may have several, their counts."""
    dims = "1" if column.side == pb.USER and not column.multi_valued else "-1"
    # Requests with histories of different lengths are batched too.
    ragged = "" if dims == "1" else " allow_ragged_batch: true"
    optional = "" if column.required else " optional: true"
    kind = "TYPE_INT64"
    if is_text(column):
        kind = "TYPE_STRING"
    elif Values.REAL in column.values:
        kind = "TYPE_FP64"
    entries = [_entry(column.name, kind, dims) + ragged + optional]
    if column.multi_valued:
        counts = "1" if column.side == pb.USER else "-1"
        entries.append(_entry(column.name + COUNTS, "TYPE_INT64", counts) + ("" if counts == "1" else ragged))
    return entries


def _entry(name: str, kind: str, dims: str) -> str:
    return f'name: "{name}" data_type: {kind} dims: [ {dims} ]'
