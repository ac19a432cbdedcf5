"""Implements `recsys.fit` and `recsys.evaluate`: the commands' training and evaluation, on any rows."""

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import torch

from recsys import files
from recsys import protos as pb
from recsys.api.batches import Batches, as_batches
from recsys.api.configs import with_sources
from recsys.api.models import Model
from recsys.api.rows import Rows
from recsys.config.feature_kinds import kinds
from recsys.data.sources.memory import PROTOCOL
from recsys.data.workers.processes import start_server
from recsys.errors import ConfigError, DataError, RecsysError
from recsys.inference.package_evaluation import evaluate_package
from recsys.logs import is_for_console
from recsys.training import checkpoint, evaluator, run
from recsys.training.distributed import gather, on_main, process_group
from recsys.training.hooks import Hook, Outcome
from recsys.training.hooks.console import Console
from recsys.training.hooks.metrics_file import NAME, MetricsFile, read_metrics
from recsys.training.recorded_evaluation import evaluation_recorder_for
from recsys.training.session import CHECKPOINTS, Session
from recsys.training.state import capture_rng, restore_rng

DATA = "data"
"""Name of the folder, within a run folder, for the rows and vocabularies that were in memory."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fit:
    """The result of a training run.

    Attributes:
        metrics: metrics of the best evaluation, by name, whose weights the model has; empty without
            validation rows.
        history: one row for every `train.log_every_steps` steps: step, epoch, loss, learning rates, speed.
        evaluations: one row per evaluation: step, `best` (whether it is the best so far), and all metrics.
        step: total number of steps.
        best_step: step of the best evaluation; None without an evaluation.
        reason: the reason why training ended, such as "all 500 steps are done".
        folder: run folder, or None without one.
    """

    metrics: dict[str, float]
    history: pa.Table
    evaluations: pa.Table
    step: int
    best_step: int | None
    reason: str
    folder: Path | None

    def __repr__(self) -> str:
        metrics = ", ".join(f"{name} {value:.4f}" for name, value in self.metrics.items())
        best = "" if self.best_step is None else f"; best after step {self.best_step}: {metrics}"
        return f"<recsys.Fit: {self.step} steps, {self.reason}{best}>"


def fit(
    model: Model,
    train: Batches | Rows | str | Path | None = None,
    *,
    validation: Batches | Rows | str | Path | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    folder: str | Path | None = None,
    callbacks: Sequence[Hook] = (),
    progress: bool = True,
) -> Fit:
    """Trains a model in place, as `python -m recsys.train` would with the same config, rows and seed.

    >>> result = recsys.fit(model, train, validation=validation, epochs=3)
    >>> result.evaluations.to_pandas().plot(x="step", y="ndcg@10")

    Training begins with the model's current weights, new optimizers and a new schedule. The model ends with
    the weights of the best evaluation, or, without validation rows, with the last weights. Interrupting the
    kernel stops after the current step and keeps what was learned. If a process group exists, it is used, and
    every rank must make the call; else a call leaves none behind.

    Args:
        model: from `recsys.build` or `recsys.load`.
        train: rows to train on; absent: `data.train` of the config.
        validation: rows to evaluate on, at the steps that `train.evaluation` sets; absent: `data.validation`
            of the config, if the config has it.
        steps, epochs: length of training, instead of `train.num_steps` and `train.num_epochs`.
        folder: run folder to write or to continue, with checkpoints, metrics and report. It has the form of
            a run folder of `recsys.train`, so all commands take it; rows from memory are saved in it. Absent:
            a temporary folder, of which nothing is kept.
        callbacks: hooks; each method of `recsys.Hook` is called as its docstring says.
        progress: print losses and metrics, unless the log of `recsys` is already shown.

    Raises:
        ConfigError: a setting does not fit, or both steps and epochs are given.
        DataError: a column is missing, or a row is bad; names row and column.
        NonFiniteLossError: a loss or gradient is not finite; the model keeps its weights.
    """
    module = model.require_module("trained")
    # Keep these objects: rows in memory live only as long as they do.
    batches = {
        name: as_batches(rows, model.config)
        for name, rows in (("train", train), ("validation", validation))
        if rows is not None
    }
    given = with_sources(
        model.config, {name: rows.source for name, rows in batches.items()}, _duration(steps, epochs)
    )
    if not given.data.HasField("train"):
        raise DataError("train: no rows are given, and the config has no data.train")
    hooks = _hooks(callbacks)
    if given.data.num_workers:
        start_server()
    before = capture_rng(next(module.parameters()).device)
    try:
        with _progress_shown(progress), process_group() as processes, _run_folder(folder) as place:
            # Reader processes do not see tables in memory.
            pipeline = on_main(lambda: _keep_rows(given, place))
            make_hooks = _in_folder(hooks) if folder is not None else _in_memory(hooks)
            with _naming_rows(place if folder is None else None):
                outcome = run.train(pipeline, place, processes, hooks=make_hooks, weights=module.state_dict())
            checkpoint.load_weights(checkpoint.find(place / CHECKPOINTS, "best"), module)
            return _result(outcome, read_metrics(place / NAME), place if folder is not None else None)
    finally:
        restore_rng(before, next(module.parameters()).device)


def evaluate(model: Model, rows: Batches | Rows | str | Path) -> dict[str, float]:
    """Computes metrics and losses of a model on rows with labels, as `python -m recsys.evaluate` does.

    >>> recsys.evaluate(model, test)
    {'ndcg@10': 0.0687, 'hit_rate@10': 0.1262, ..., 'loss': 6.95}

    Args:
        model: from `recsys.build`, `recsys.fit` or `recsys.load`; a package is measured by its own answers.
        rows: rows in any form that `recsys.batches` takes, or its result.

    Returns:
        The config's metrics by name, `loss`, and with several tasks also `loss/<task>`; NaN if undefined. A
        package has no losses, because its answers hold no logits.

    Raises:
        DataError: a label or another column is missing, or a row is bad.
        PackageError: `rows` are `Batches` of more rows than the package accepts.
    """
    rank, world_size = 0, 1
    if torch.distributed.is_initialized():
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    batches = as_batches(rows, model.config)  # holds rows in memory until the end
    loader = batches.loader("evaluate", rank=rank, world_size=world_size)
    if model.package is not None:
        return evaluate_package(model.package, loader, torch.device(model.package.description.device)).metrics
    module = model.require_module("evaluated")
    device = next(module.parameters()).device
    recorder = evaluation_recorder_for(module, module.pipeline, device, world_size)
    return evaluator.evaluate(module, loader, device, recorder=recorder)


def _duration(steps: int | None, epochs: int | None) -> list[str]:
    if steps is not None and epochs is not None:
        raise ConfigError(f"steps = {steps} and epochs = {epochs} are given; give one of them")
    if steps is not None:
        return [f"train.num_steps={steps}"]
    return [] if epochs is None else [f"train.num_epochs={epochs}"]


def _hooks(callbacks: Sequence[Hook]) -> list[Hook]:
    if isinstance(callbacks, Hook):
        return [callbacks]
    for callback in callbacks:
        if not isinstance(callback, Hook):
            raise ConfigError(
                f"callbacks: {callback!r} is given; give objects of classes that extend recsys.Hook"
            )
    return list(callbacks)


def _in_folder(hooks: list[Hook]) -> Any:
    return lambda session: [*run.folder_hooks(session), *hooks]


def _in_memory(hooks: list[Hook]) -> Any:
    def make(session: Session) -> list[Hook]:
        return [MetricsFile(), _Progress(), *run.configured_hooks(session.pipeline), *hooks]

    return make


class _Progress(Console):
    """Shows the console's lines except those about files, because no files are kept."""

    def finished(self, outcome: Outcome) -> None:
        """Shows the reason why the run ended, and its best evaluation."""
        self.close()
        best = outcome.best
        line = "" if best is None else f"; best: {best.metric} {best.value:.4f} after step {best.step}"
        log.info("stopped after step %d: %s%s", outcome.step, outcome.reason, line)


@contextlib.contextmanager
def _progress_shown(shown: bool) -> Iterator[None]:
    """Prints the package's log during the block, unless the caller already shows it."""
    package = logging.getLogger("recsys")
    if not shown or (package.isEnabledFor(logging.INFO) and package.hasHandlers()):
        yield
        return
    handler, level, propagate = _Printer(), package.level, package.propagate
    handler.addFilter(is_for_console)
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    package.propagate = False
    try:
        yield
    finally:
        package.removeHandler(handler)
        package.setLevel(level)
        package.propagate = propagate


class _Printer(logging.Handler):
    """Prints to the current sys.stdout, which a notebook shows below the cell."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record))


@contextlib.contextmanager
def _run_folder(folder: str | Path | None) -> Iterator[Path]:
    """Yields the run folder, or one that is removed after the block; the same on every rank."""
    if folder is not None:
        yield Path(folder)
        return
    place = on_main(lambda: Path(tempfile.mkdtemp(prefix="recsys-")))
    try:
        yield place
        # Other ranks may still be reading.
        gather(None)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _keep_rows(pipeline: pb.Pipeline, folder: Path) -> pb.Pipeline:
    """Writes rows and vocabularies in memory into the run folder, and returns the pipeline with these files.

    Raises:
        RecsysError: the folder already has other rows.
    """
    data = pipeline.data
    for split in ("train", "validation", "test"):
        if data.HasField(split) and getattr(data, split).HasField("parquet"):
            paths = getattr(data, split).parquet.paths
            paths[:] = [_keep(path, folder / DATA / f"{split}.parquet") for path in paths]
    for kind in kinds(pipeline):
        vocabulary = kind.vocabulary
        if vocabulary is not None:
            name = f"{kind.table}.parquet"
            vocabulary.file = _keep(vocabulary.file, folder / DATA / "vocabulary" / name)
    if data.item_file:
        data.item_file = _keep(data.item_file, folder / DATA / "items.parquet")
    return pipeline


@contextlib.contextmanager
def _naming_rows(temporary: Path | None) -> Iterator[None]:
    """Leaves a temporary folder, which is gone when a user reads it, out of errors about rows."""
    try:
        yield
    except DataError as error:
        if temporary is None:
            raise
        raise DataError(str(error).replace(f"{(temporary / DATA).resolve()}/", "")) from None


def _keep(address: str, path: Path) -> str:
    """Copies a file in memory to a path and returns the path; any other address is returned unchanged."""
    if not address.startswith(PROTOCOL):
        return address
    with fsspec.open(address, "rb") as file:
        content = file.read()
    if path.exists() and path.read_bytes() != content:
        raise RecsysError(
            f"{path}: the folder holds a run on other rows; give the same rows to resume, or another folder"
        )
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.partial")
        aside.write_bytes(content)
        files.publish(aside, path)
    return str(path.resolve())


def _result(outcome: Outcome, records: list[dict[str, Any]], folder: Path | None) -> Fit:
    steps = [_flat(record, ("losses", "lr")) for record in records if record["kind"] == "train"]
    evaluations = [_flat(record, ("metrics",)) for record in records if record["kind"] == "evaluation"]
    best = None if outcome.best is None else outcome.best.step
    metrics = next((r["metrics"] for r in records if r["kind"] == "evaluation" and r["step"] == best), {})
    return Fit(
        metrics={name: float("nan") if value is None else value for name, value in metrics.items()},
        history=pa.Table.from_pylist(steps),
        evaluations=pa.Table.from_pylist(evaluations),
        step=outcome.step,
        best_step=best,
        reason=outcome.reason,
        folder=folder,
    )


def _flat(record: dict[str, Any], inner: Sequence[str]) -> dict[str, Any]:
    """Flattens a record to a row: entries of `metrics` keep their names, others become `lr/dense`."""
    row = {name: value for name, value in record.items() if name != "kind" and name not in inner}
    for name in inner:
        prefix = "" if name == "metrics" else f"{'loss' if name == 'losses' else name}/"
        row |= {prefix + key: value for key, value in record[name].items()}
    return row
