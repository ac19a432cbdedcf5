"""Reads and describes a package: the folder that `recsys.export` writes and `recsys.predict` loads.

    package.json             description: format, kind, versions, target, inputs, outputs, limits
    manifest.json            SHA-256 of every other file
    manifest.sig             if the package is signed: the signature of the manifest
    model.pt2                AOTInductor package of the scoring graph: native code, as safe as its sender
    config.resolved          the resolved config of the training run
    vocabulary/              original ids of every table
    tables/                  large embedding tables, memory-mapped; see `mapped_tables`
    item_embeddings.parquet  retrieval: `id` and `vector` of every item, in the order of its vocabulary file
    item_tower.pt2           retrieval with an item encoder: the graph from items to vectors
    golden.safetensors       a few real rows with the evaluated model's answers, compared at every load
    golden_items.safetensors a few items with their vectors, for the item tower
    parity.json              how close the package came to the evaluated model on real rows

With `export.cached_scoring` the folder also has the files of `cached_programs`.
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypedDict

import pyarrow as pa
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

import recsys.config as config
from recsys import environment, files, typed_json
from recsys import protos as pb
from recsys.config import features
from recsys.config.declarations import model_of
from recsys.data.arrow import first_line
from recsys.data.batch import Batch
from recsys.errors import shortened
from recsys.inference.cached_programs import CACHED, WEIGHTS, CachedDescription, CachedPrograms
from recsys.inference.golden import golden_inputs, largest_difference
from recsys.inference.item_embeddings import FILE as VECTORS
from recsys.inference.item_embeddings import new_items, read_vectors
from recsys.inference.mapped_tables import RowInputs, TableEntry, by_column, open_tables
from recsys.inference.package_files import check_files, require_inside
from recsys.inference.program import PackageError, Program
from recsys.models.signature import TensorSpec
from recsys.ops import TopK
from recsys.scoring.cache import UserCache
from recsys.scoring.padded_inputs import PaddedInputs
from recsys.scoring.recorded import RecordedScoring
from recsys.scoring.signature import flatten, scoring_signature

log = logging.getLogger(__name__)

FORMAT = 3
DESCRIPTION = "package.json"
MODEL, GOLDEN, VOCABULARY = "model.pt2", "golden.safetensors", "vocabulary"
DEVICES = ("cpu", "cuda")
ITEM_TOWER, GOLDEN_ITEMS = "item_tower.pt2", "golden_items.safetensors"


@dataclass
class Description:
    """The content of `package.json`.

    Attributes:
        kind: the kind of model, by its field in `pb.Model`.
        step: number of optimizer steps that trained the weights.
        device: "cpu" or "cuda".
        target: the instruction set or GPU architecture that the package was compiled for.
        inputs: name, dtype and named dims of every input, in order.
        outputs: names of the output's columns.
        max_batch_size: the largest number of rows in a call.
        tolerance: the largest allowed |a - b| / max(1, |b|) on golden rows.
        op_libraries: Python modules that register operators of the graph, imported before it is loaded.
        cached: the programs that score with a cache, as `CachedDescription`; None if there are none.
        item_inputs: the inputs of the item tower, in the form of `inputs`; None if there is no tower.
        tables: the embedding tables that are files of their own, if there are any.
        recordable: whether a CUDA graph can hold a call; not if the program reads sizes from the device.
    """

    kind: str
    step: int
    device: str
    target: str
    inputs: list[dict]
    outputs: list[str]
    max_batch_size: int
    tolerance: float
    op_libraries: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=environment.versions)
    cached: dict | None = None
    item_inputs: list[dict] | None = None
    tables: list[TableEntry] = field(default_factory=list)
    recordable: bool = True
    format: int = FORMAT


class _Format(TypedDict):
    format: int


_DAMAGED = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RuntimeError,
    OSError,
    SafetensorError,
    pa.ArrowException,
)
"""Errors that loading damaged files of a package can raise."""


class Package:
    """A loaded package. A GPU replays recorded graphs for small batches; see `RecordedScoring`.

    Attributes:
        description: the content of `package.json`.
        pipeline: the resolved config; its vocabulary files point into the package.
        items: float32 [V, E], the vectors of all items in the order of the vocabulary, if the model searches
            items; else None.
        item_tower: the program from items to vectors, if the model has an item encoder; else None.
        cached: the programs that score with a cache; None if the package was exported without them.

        Raises:
            PackageError: the package is damaged, has another format, does not fit this machine, or does not
                give its stored answers.
    """

    def __init__(self, folder: Path, *, check_golden: bool = True, verify_key: Path | None = None):
        """Loads the package.

        Args:
            folder: folder of the package.
            verify_key: file of the public key that must have signed the package; see `package_files`.
            check_golden: whether to compare with the stored answers; the exporter compares more rows itself.
        """
        folder = Path(folder)
        _require_package(folder)
        check_files(folder, verify_key)
        self.folder = folder
        self.description = _read_description(folder)
        _require_device(folder, self.description)
        self.pipeline = _read_config(folder)
        _require_same_model(folder, self.description, self.pipeline)
        try:
            self._load(folder)
            if check_golden:
                self._check_golden()
        except _DAMAGED as error:
            raise PackageError(
                f"{folder}: cannot be loaded ({first_line(error)}): export it again"
            ) from error

    def _load(self, folder: Path) -> None:
        """Loads the item vectors and the programs."""
        self.items, declared = None, model_of(self.pipeline)
        self._finds_items = declared.finds_items
        if declared.item_feature is not None:
            self.items = read_vectors(folder)
            _require_vector_each(folder, self.items, self.pipeline)
        device, weights = torch.device(self.description.device), None
        mapped = open_tables(folder, self.description.tables)
        tables, libraries = by_column(self.pipeline, mapped), self.description.op_libraries
        records = device.type == "cuda" and not mapped

        def program(name: str, inputs: list[dict]) -> Program:
            specs = [TensorSpec.from_json(entry) for entry in inputs]
            rows = RowInputs(specs, tables)
            look_up = rows.of if rows.columns else None
            recordable = records and (name == CACHED or name == MODEL and self.description.recordable)
            return Program(folder / name, specs, device, libraries, weights, look_up, recordable=recordable)

        self.cached = None
        if self.description.cached is not None:
            entry = CachedDescription(**self.description.cached)
            # `load_file` takes "cuda" for the first GPU, not for the GPU of this process.
            place = f"cuda:{torch.cuda.current_device()}" if device.type == "cuda" else "cpu"
            weights = load_file(folder / WEIGHTS, device=place)
            self.cached = CachedPrograms.load(entry, self.pipeline, program)
            if records:
                self.cached.record(device)
        self._program = program(MODEL, self.description.inputs)
        self._run: Callable[[Sequence[Tensor]], tuple[Tensor, ...]] = self._program
        if records and self.description.recordable:
            padded = PaddedInputs(self.pipeline, scoring_signature(self.pipeline))
            recorded = RecordedScoring(
                lambda *inputs: self._program(inputs), padded, device, str(folder / MODEL)
            )
            self._run = lambda inputs: recorded(*inputs)
        self.item_tower = None
        if self.description.item_inputs is not None:
            self.item_tower = program(ITEM_TOWER, self.description.item_inputs)

    def run(self, batch: Batch) -> Tensor:
        """Scores a batch; returns predictions [N, tasks] of a ranker or queries [B, E] of a retriever.

        The result is float32 on the package's device and possibly still being computed.

        Raises:
            PackageError: the batch has more rows than the package accepts.
        """
        self._check_rows(batch)
        (output,) = self._run(flatten(batch, with_seen=self._finds_items))
        return output.float()

    def find(self, batch: Batch) -> TopK:
        """Finds the best items of each row, of a model that finds items itself (`finds_items`).

        The result is on the package's device: items are rows of the item table less 1.

        Raises:
            PackageError: the batch has more rows than the package accepts.
        """
        self._check_rows(batch)
        return TopK(*self._run(flatten(batch, with_seen=self._finds_items)))

    def prefill(self, batch: Batch) -> UserCache:
        """Encodes users and histories into keys and values that candidates attend to; see `CachedPrograms`.

        Raises:
            PackageError: the batch has more rows than the package accepts, or the package has no such
                program.
        """
        return self._cached_programs(batch).prefill(batch)

    def extend(self, batch: Batch, cache: UserCache) -> UserCache:
        """Appends later events to the users of a cache; see `CachedPrograms.extend`. Raises as `prefill`."""
        return self._cached_programs(batch).extend(batch, cache)

    def score(self, batch: Batch, cache: UserCache) -> Tensor:
        """Scores candidates of the users of the cache; see `CachedPrograms.score`. Raises as `prefill`."""
        return self._cached_programs(batch).score(batch, cache)

    def item_vectors(self, table: pa.Table) -> Tensor:
        """Computes the vectors of any items, even new ones, float32 [n, E] on the host.

        They can be searched together with the vectors in `item_embeddings.parquet`.

        Args:
            table: one row per item, with the columns of `data.item_file`: original ids and features.

        Raises:
            DataError: a column is missing, or holds invalid values.
            PackageError: the model has no item encoder.
        """
        if self.item_tower is None:
            raise PackageError(
                f"{self.folder}: the model has no item encoder, so there is no item tower to run"
            )
        (output,) = self.item_tower(new_items(self.pipeline, table))
        return output.float().cpu()

    def item_difference(self, stored: dict[str, Tensor]) -> float:
        """Returns the largest difference between the item tower and vectors stored by `golden_tensors`."""
        if self.item_tower is None:
            raise PackageError(f"{self.folder}: there is no item tower")
        (output,) = self.item_tower(golden_inputs(stored))
        return largest_difference(output.float().cpu(), stored["output"])

    def _cached_programs(self, batch: Batch) -> CachedPrograms:
        self._check_rows(batch)
        if self.cached is None:
            raise PackageError(
                f"{self.folder}: it has no programs that score with a cache; export it with "
                "export.cached_scoring = true"
            )
        return self.cached

    def _check_rows(self, batch: Batch) -> None:
        rows = len(batch.uih_lengths)
        if rows > self.description.max_batch_size:
            raise PackageError(
                f"{rows} rows in one call; the package was exported for export.max_batch_size = "
                f"{self.description.max_batch_size}: make predict.batch_size smaller"
            )

    def warm_up(self) -> None:
        """Scores the stored rows twice; on a GPU, the first call loads kernels and the second one records.

        Raises:
            PackageError: it cannot score, such as for lack of memory.
        """
        inputs = golden_inputs(load_file(self.folder / GOLDEN))
        try:
            for _ in range(2):
                self._run(inputs)
        except RuntimeError as error:
            raise PackageError(
                f"{self.folder}: cannot score its stored rows ({first_line(error)})"
            ) from error

    def run_flat(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Scores flat inputs in the order of `description.inputs`, like `run` or `find`; on the host."""
        return self._program(inputs)[0].float().cpu()

    def differences(self, stored: dict[str, Tensor]) -> list[float]:
        """Compares a stored answer with the whole model's program and, if the package has it, cached scoring.

        Args:
            stored: inputs and output as made by `golden_tensors`.

        Returns:
            The largest difference for each way to score.
        """
        ways = [self.run_flat]
        if self.cached is not None:
            ways.append(self.cached.run_flat)
            if self.cached.extends:
                ways.append(self.cached.run_flat_extended)
        return [largest_difference(run(golden_inputs(stored)), stored["output"]) for run in ways]

    def _check_golden(self) -> None:
        difference = max(self.differences(load_file(self.folder / GOLDEN)))
        if self.item_tower is not None:
            difference = max(difference, self.item_difference(load_file(self.folder / GOLDEN_ITEMS)))
        if not difference <= self.description.tolerance:
            raise PackageError(
                f"{self.folder}: the golden rows differ by {difference:.2e} from what they were when the "
                f"package was made, {self.description.tolerance:.0e} is allowed: this machine computes "
                "different results. Export the package on a machine like this one."
            )


def require_replaceable(folder: Path) -> None:
    """Checks that a new package in this folder would replace nothing but an older package.

    Raises:
        PackageError: names the file that is in the way.
    """
    if folder.exists() and not folder.is_dir():
        raise PackageError(f"{folder} is a file, and a package is a folder: give another --output")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (folder / DESCRIPTION).is_file():
        raise PackageError(f"{folder} is not empty and holds no package: give another --output")
    for path in files.not_in_manifest(folder):
        raise PackageError(
            f"{path} is not part of the package in {folder}, which the new package would replace entirely: "
            "move it, or give another --output"
        )


def write_description(folder: Path, description: Description) -> None:
    """Writes `package.json`."""
    content = asdict(description)
    if not description.tables:
        # Versions that do not know such tables can then read the package.
        del content["tables"]
    (folder / DESCRIPTION).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def architecture() -> str:
    """Returns the architecture of this process's GPU, as packages name it."""
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


def _require_package(folder: Path) -> None:
    if (folder / DESCRIPTION).exists() or (folder / files.MANIFEST).exists():
        return
    below = folder / "export"
    hint = f"; it is in {below}" if (below / DESCRIPTION).exists() else ""
    raise PackageError(f"{folder}: there is no package here ({DESCRIPTION} is missing){hint}")


def _read_description(folder: Path) -> Description:
    try:
        content = (folder / DESCRIPTION).read_bytes()
        stored = typed_json.parse(content, _Format)["format"]
        if stored == FORMAT:
            return typed_json.parse(content, Description)
    except (OSError, ValueError, TypeError) as error:
        raise PackageError(f"{folder / DESCRIPTION}: cannot be read ({error}): export it again") from error
    raise PackageError(f"{folder}: package format {stored}, this version reads format {FORMAT}")


def _require_device(folder: Path, description: Description) -> None:
    """Raises PackageError if the package's device is missing or differs; logs if a GPU remains unused."""
    if description.device not in DEVICES:
        devices = " or ".join(DEVICES)
        problem = f"{folder / DESCRIPTION}: device is {shortened(description.device)}; it must be {devices}"
        raise PackageError(f"{problem}: export it again")
    if description.device != "cuda":
        if torch.cuda.is_available():
            log.info("%s: compiled for a CPU; a package exported on this machine would use its GPU", folder)
        return
    compiled_for = f"{folder}: compiled for a GPU of architecture {description.target}"
    again = "export the run again on a machine like this one, or predict where there is such a GPU"
    if not torch.cuda.is_available():
        raise PackageError(f"{compiled_for}; PyTorch finds no GPU here: {again}")
    present = architecture()
    if present != description.target:
        raise PackageError(f"{compiled_for}; {torch.cuda.get_device_name()} here is {present}: {again}")


def _require_same_model(folder: Path, description: Description, pipeline: pb.Pipeline) -> None:
    """Raises PackageError if `package.json` and the config describe different models."""
    declared = model_of(pipeline)
    inputs = [spec.to_json() for spec in scoring_signature(pipeline)]
    is_same_model = description.kind == declared.kind and description.outputs == declared.outputs
    if not is_same_model or description.inputs != inputs:
        problem = f"it describes another model than {config.FILE_NAME} beside it"
        raise PackageError(f"{folder / DESCRIPTION}: {problem}: export it again")


def _require_vector_each(folder: Path, vectors: Tensor, pipeline: pb.Pipeline) -> None:
    """Raises PackageError if number or width of the vectors do not fit the config's items."""
    # A model that scores items itself is never compared with their vectors, whose width is its own affair.
    width = vectors.shape[1] if not model_of(pipeline).embeds_items else pipeline.model.embedding_dim
    expected = (features.table_rows(features.searched_item(pipeline)) - 1, width)
    if tuple(vectors.shape) != expected:
        shapes = "{} vectors of {} numbers; expected {} of {}".format(*vectors.shape, *expected)
        raise PackageError(f"{folder / VECTORS}: {shapes}: export it again")


def _read_config(folder: Path) -> pb.Pipeline:
    pipeline = config.prepare(folder / config.FILE_NAME, read_files=False, follow_imports=False).pipeline
    for kind in features.kinds(pipeline):
        if kind.vocabulary is not None:
            require_inside(kind.vocabulary.file, f"{folder / config.FILE_NAME}: {kind.feature.name}")
            kind.vocabulary.file = str(folder / kind.vocabulary.file)
    return pipeline
