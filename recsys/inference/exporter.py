"""Makes a package from a checkpoint and proves that it gives the same answers.

`torch.export` captures the scoring graph with every size dynamic, and AOTInductor compiles it ahead of time.
A new process (`Trial`) then loads the package and compares it with the evaluated model on real rows. With
`export.cached_scoring` the same happens to the programs that score with a cache. Only a package that agrees
gets its final name.
"""

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import fsspec
import torch
from torch import Tensor, nn

import recsys.config as config
from recsys import files
from recsys import protos as pb
from recsys.config import extensions, features
from recsys.config.declarations import model_of
from recsys.data.batch import Batch
from recsys.data.loader import Loader
from recsys.data.schema.vocabulary import mappings
from recsys.errors import RecsysError
from recsys.inference import cached_programs, package
from recsys.inference.cached_programs import CachedDescription
from recsys.inference.compiler import compile_graph, instruction_set, require_compiler
from recsys.inference.golden import golden_tensors, write_tensors
from recsys.inference.item_embeddings import catalogue, write_vectors
from recsys.inference.mapped_tables import (
    MappedTable,
    RowInputs,
    TrainedTable,
    by_column,
    write_tables,
)
from recsys.inference.trial import ITEM_TRIAL, TRIAL, Trial, why_it_failed
from recsys.models.base import Model, layout_rule
from recsys.models.check_kernels import check_kernels
from recsys.models.item_tower import first_items, flatten_items, item_signature
from recsys.models.signature import TensorSpec
from recsys.modules.metrics.base import compute_all
from recsys.scoring.signature import ScoringGraph, example_inputs, inputs_of, scoring_signature

GOLDEN_ROWS = 8
"""Number of golden rows, and of golden items, that a package checks itself against at every load."""

QUANTIZATION = "quantization.json"
"""File of a package with its metrics on the rows of the comparison before and after quantization."""

HOW = {
    "cached": ", when it scores with a cache,",
    "extended": ", when it extends a cache,",
    "items": " about items",
}

log = logging.getLogger(__name__)


class ParityError(RecsysError):
    """The compiled graph does not compute what the evaluated model computes."""


@dataclass
class Exported:
    """The result of an export.

    Attributes:
        folder: folder of the package.
        rows: number of real rows that were compared.
        difference: largest |a - b| / max(1, |b|) between the answers of package and evaluated model.
    """

    folder: Path
    rows: int
    difference: float


@dataclass
class ExportSource:
    """The input of an export.

    Attributes:
        pipeline: the resolved config.
        model: the model with trained weights, in evaluation mode, on the device that the package is for.
        step: number of optimizer steps that trained the weights.
        batches: real rows, in batches of several sizes; the first batch is the golden batch.
        tables: the trained tables that become files of the package; the model has none of them, see
            `EmbeddingGroup.move_outside`.
    """

    pipeline: pb.Pipeline
    model: Model
    step: int
    batches: list[Batch]
    tables: Mapping[str, TrainedTable] = field(default_factory=dict)


def export(source: ExportSource, folder: Path) -> Exported:
    """Writes the package of a model to `folder`, replacing an older package once the new one is proven.

    Raises:
        InstallationError: there is no C++ compiler, or it does not work.
        ConfigError: the config names a kernel that the device cannot run.
        ParityError: the package's answers differ from the model's by more than `export.parity_tolerance`.
        RecsysError: there are no rows to compare on, no space is left, or `folder` holds something other than
            a package.
    """
    package.require_replaceable(Path(folder))
    require_compiler()
    check_kernels(source.pipeline, next(source.model.parameters()).device.type)
    if instruction_set(source.pipeline) != source.pipeline.export.march:
        log.warning(
            "PyTorch %s compiles for the processor of this machine, not for export.march (%s): on an older "
            "one the package may stop with an illegal instruction; 2.13 compiles for export.march",
            torch.__version__,
            source.pipeline.export.march,
        )
    if not any(len(batch.uih_lengths) for batch in source.batches):
        raise RecsysError(
            "there are no rows to compare the package on: data.validation and data.train are empty"
        )
    graph = ScoringGraph(source.model)
    if not any(_score(graph, batch).numel() for batch in source.batches):
        raise RecsysError(
            "the rows to compare the package on (data.validation, else data.train) have no candidates, so "
            "nothing would be compared"
        )
    place = Path(folder).resolve()
    with (
        files.whole_folder(place) as aside,
        files.naming_full_disk(place),
        Trial(aside, extensions.modules_of(source.pipeline)) as trial,
    ):
        mapped = _write_tables(source, aside)
        expected = [_score(graph, batch) for batch in source.batches]
        log.info("capturing and compiling the scoring graph")
        recordable = _compile_programs(source, graph, aside, mapped)
        _write_sides(source, aside, expected[0], mapped, recordable)
        hashed = files.write_manifest(aside)
        log.info("loading the package in a fresh process and comparing it on real rows")
        difference = _prove(source, aside, expected, trial)
        files.write_manifest(aside, hashed)
    rows = sum(len(batch.uih_lengths) for batch in source.batches)
    return Exported(Path(folder), rows, difference)


def comparison_rows(pipeline: pb.Pipeline) -> list[Batch]:
    """Reads `export.parity_rows` real rows to compare on: validation rows or, without them, training rows.

    The first batch is small, because it becomes the golden batch.
    """
    split = "validation" if pipeline.data.HasField("validation") else "train"
    batches: list[Batch] = []
    for batch_size, wanted in (
        (GOLDEN_ROWS, 1),
        (pipeline.data.eval_batch_size, GOLDEN_ROWS + pipeline.export.parity_rows),
    ):
        settings = pb.Pipeline()
        settings.CopyFrom(pipeline)
        settings.data.eval_batch_size = batch_size
        settings.data.num_workers = 0
        loader = Loader.open(settings, split, layout_rule(pipeline), shuffle=True, mode="evaluate")
        for batch in loader.epoch():
            batches.append(batch)
            if sum(len(b.uih_lengths) for b in batches) >= wanted:
                break
    return batches


def _write_tables(source: ExportSource, folder: Path) -> dict[str, MappedTable]:
    """Writes the tables that become files, and makes the model look their rows up there."""
    outside, dtype = source.model.embed.outside, source.pipeline.export.tables.dtype
    if outside is None:
        if dtype:
            limit = source.pipeline.export.tables.memory_map_above_bytes
            log.warning("export.tables.dtype has no effect: no table has more than %d bytes", limit)
        return {}
    trained = _metrics(source) if dtype else {}
    mapped = write_tables(folder, source.tables, dtype)
    outside.look_ups = {name: table.look_up for name, table in mapped.items()}
    if dtype:
        _report_quantization(source, folder, trained)
    return mapped


def _report_quantization(source: ExportSource, folder: Path, trained: dict[str, float]) -> None:
    """Logs and stores the model's metrics with tables as trained and with those of the package."""
    dtype = pb.ExportTables.Dtype.Name(source.pipeline.export.tables.dtype)
    rows = sum(len(batch.uih_lengths) for batch in source.batches)
    metrics = {name: {"trained": trained[name], "package": value} for name, value in _metrics(source).items()}
    for name, value in metrics.items():
        log.info("%s on %d rows: %.5f as trained, %.5f with %s", name, rows, *value.values(), dtype)
    content = json.dumps({"dtype": dtype, "rows": rows, "metrics": metrics}, indent=1)
    (folder / QUANTIZATION).write_text(content + "\n", encoding="utf-8")


def _metrics(source: ExportSource) -> dict[str, float]:
    device = next(source.model.parameters()).device
    metrics = {name: metric.to(device) for name, metric in source.model.metrics().items()}
    with torch.no_grad():
        for batch in source.batches:
            source.model.update_metrics(metrics, source.model(batch), batch)
    return compute_all(metrics)


def _compile_programs(
    source: ExportSource, graph: ScoringGraph, folder: Path, mapped: dict[str, MappedTable]
) -> bool:
    """Compiles the whole model, the item tower and, with `export.cached_scoring`, the cached programs.

    Returns:
        Whether a CUDA graph could hold a call of the whole model.
    """
    pipeline, device = source.pipeline, next(source.model.parameters()).device
    cached = pipeline.export.cached_scoring
    weights: dict[str, Tensor] | None = {} if cached else None
    tables = by_column(pipeline, mapped)

    def compile_to(graph: nn.Module, specs: list[TensorSpec], inputs: tuple[Tensor, ...], name: str) -> bool:
        rows = RowInputs(specs, tables)
        graph, inputs = rows.added_to(graph, source.model.embed.outside), (*inputs, *rows.of(inputs))
        return compile_graph(graph, [*specs, *rows.specs], inputs, folder / name, pipeline, weights)

    specs = scoring_signature(pipeline)
    recordable = compile_to(graph, specs, example_inputs(specs, device), package.MODEL)
    tower = source.model.item_tower()
    if tower is not None:
        log.info("capturing and compiling the item tower")
        specs = item_signature(pipeline)
        compile_to(tower.eval(), specs, example_inputs(specs, device), package.ITEM_TOWER)
    if cached:
        log.info("capturing and compiling the programs that score with a cache")
        cached_programs.compile_programs(source.model, compile_to)
        write_tensors(folder / cached_programs.WEIGHTS, weights)
    return recordable


def _score(graph: ScoringGraph, batch: Batch) -> Tensor:
    with torch.no_grad():
        answer = graph(*inputs_of(batch, graph.model.pipeline))
        # Of items that a model has found, the scores are compared: equal ones may come in another order.
        return (answer if isinstance(answer, Tensor) else answer[0]).float().cpu()


def _write_sides(
    source: ExportSource, folder: Path, golden: Tensor, mapped: dict[str, MappedTable], recordable: bool
) -> None:
    """Writes every file of the package except the compiled graphs."""
    pipeline, model = source.pipeline, source.model
    stored = pb.Pipeline()
    stored.CopyFrom(pipeline)
    (folder / package.VOCABULARY).mkdir()
    for kind in features.kinds(stored):
        if kind.vocabulary is not None:
            name = f"{package.VOCABULARY}/{kind.table}.parquet"
            with fsspec.open(kind.vocabulary.file, "rb") as file:
                (folder / name).write_bytes(file.read())
            kind.vocabulary.file = name
    (folder / config.FILE_NAME).write_text(config.to_text(stored), encoding="utf-8")
    declared, item_inputs = model_of(pipeline), None
    if declared.item_feature is not None:
        vocabulary = mappings(pipeline)[features.searched_item(pipeline).id.table]
        write_vectors(folder, vocabulary.ids, catalogue(model, source.batches[0], pipeline))
    if model.item_tower() is not None:
        item_inputs = [spec.to_json() for spec in item_signature(pipeline)]
        write_tensors(folder / package.GOLDEN_ITEMS, _golden_items(model, source, GOLDEN_ROWS))
    device = next(model.parameters()).device.type
    target = package.architecture() if device == "cuda" else instruction_set(pipeline)
    description = package.Description(
        kind=declared.kind,
        step=source.step,
        device=device,
        target=target,
        inputs=[spec.to_json() for spec in scoring_signature(pipeline)],
        outputs=declared.outputs,
        max_batch_size=pipeline.export.max_batch_size,
        tolerance=pipeline.export.parity_tolerance,
        item_inputs=item_inputs,
        tables=[table.entry for table in mapped.values()],
        recordable=recordable,
    )
    if pipeline.export.cached_scoring:
        description.cached = CachedDescription.of(model).to_json()
    package.write_description(folder, description)
    inputs = inputs_of(source.batches[0], pipeline)
    write_tensors(folder / package.GOLDEN, golden_tensors(inputs, golden))


def _golden_items(model: Model, source: ExportSource, limit: int | None = None) -> dict[str, Tensor]:
    """Returns inputs and vectors of the first `limit` items of the catalogue; None means all."""
    batch = source.batches[0]
    with torch.no_grad():
        vectors = model.item_vectors(batch)
    inputs = first_items(flatten_items(batch, source.pipeline), item_signature(source.pipeline), limit)
    return golden_tensors(inputs, vectors[:limit])


def _prove(source: ExportSource, folder: Path, expected: list[Tensor], trial: Trial) -> float:
    """Runs every batch through the package in a new process and writes `parity.json`.

    Returns:
        The largest difference.

    Raises:
        ParityError: the difference is too large, or the package does not run.
    """
    given = folder / TRIAL
    given.mkdir()
    for number, (batch, output) in enumerate(zip(source.batches, expected, strict=True)):
        tensors = golden_tensors(inputs_of(batch, source.pipeline), output)
        write_tensors(given / f"{number:04d}.safetensors", tensors)
    if source.model.item_tower() is not None:
        write_tensors(folder / ITEM_TRIAL, _golden_items(source.model, source))
    done = trial.run()
    if done.returncode != 0:
        raise ParityError(
            f"the package does not run in a fresh process: {why_it_failed(done)}. If it crashed while "
            "loading, the C++ compiler may link libstdc++ statically: name another one in CXX (`python -m "
            "recsys.doctor` tries a tiny package)"
        )
    differences = json.loads(done.stdout.strip().splitlines()[-1])
    shutil.rmtree(given)
    allowed, report = source.pipeline.export.parity_tolerance, {}
    of_items = differences.pop()
    ways = ("largest_difference", "largest_difference_cached", "largest_difference_extended")
    for name, errors in zip(ways, zip(*differences, strict=True), strict=False):
        report[name] = max(errors)
    if of_items:
        report["largest_difference_items"] = max(of_items)
    for name in report:
        if not report[name] <= allowed:
            how = HOW.get(name.rpartition("_")[2], "")
            raise ParityError(
                f"the package's answers{how} differ from the evaluated model's by {report[name]:.2e} on real "
                f"rows; export.parity_tolerance allows {allowed:.0e}. Nothing was exported."
            )
    difference = max(report.values())
    rows = sum(len(batch.uih_lengths) for batch in source.batches)
    report = {"rows": rows, "batches": len(differences), **report, "allowed": allowed}
    (folder / "parity.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return difference
