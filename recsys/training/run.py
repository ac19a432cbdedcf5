"""Runs training from config to last log line, and evaluates saved states."""

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import recsys.config as config
from recsys import files
from recsys import protos as pb
from recsys.config import registry
from recsys.config.declarations import model_of
from recsys.data.batch import Batch
from recsys.data.counts import Counts
from recsys.data.loader import Loader
from recsys.data.negatives import read_counts
from recsys.errors import ConfigError, RecsysError
from recsys.evaluation.reference import measure_reference
from recsys.models import Model, build_model, layout_rule
from recsys.models.check_kernels import check_kernels
from recsys.models.popularity import popularity_groups, popularity_sums
from recsys.training import averaging, checkpoint, evaluator, out_of_memory, run_vocabularies
from recsys.training.distributed import Processes, on_main
from recsys.training.hooks import Hook, Outcome, Run, SplitMetrics
from recsys.training.hooks.console import Console, next_lines
from recsys.training.hooks.hyperparameters import hyperparameters
from recsys.training.hooks.metrics_file import MetricsFile
from recsys.training.hooks.projector import Items, frequent_items
from recsys.training.hooks.report import Report
from recsys.training.recorded_evaluation import evaluation_recorder_for
from recsys.training.resume import require_same_model
from recsys.training.session import CHECKPOINTS, Session, open_session
from recsys.training.sharding import plan_tables, shard
from recsys.training.train_step import TrainStep
from recsys.training.trainer import Trainer


@dataclass(frozen=True)
class Evaluation:
    """Metrics of a saved state by name, with counts of the rows that were left out or cut."""

    checkpoint: Path
    metrics: dict[str, float]
    counts: Counts


@dataclass(frozen=True)
class LoadedModel:
    """A model with the weights of a saved state."""

    checkpoint: Path
    model: Model


log = logging.getLogger(__name__)


def train(
    pipeline: pb.Pipeline,
    folder: Path,
    processes: Processes,
    *,
    hooks: Callable[[Session], list[Hook]] | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> Outcome:
    """Trains the model of a resolved config in a run folder, from the last saved state if there is one.

    Args:
        pipeline: the resolved config.
        folder: the run folder.
        processes: this rank.
        hooks: makes the run's hooks, on rank 0; None makes `folder_hooks`.
        weights: initial weights of a new run, by their names in the model; None draws them from `train.seed`.

    Raises:
        ConfigError: the config asks for something that the device cannot do, or for a missing library.
        RecsysError: another process trains in this folder, a checkpoint cannot be written, or a GPU is full.
    """
    config.check_libraries(pipeline)
    _check_device(pipeline, processes)
    with ExitStack() as stack:
        stack.enter_context(files.naming_full_disk(folder))
        on_main(lambda: _take(folder, stack))
        session = open_session(pipeline, folder, processes, weights)
        on_main(lambda: run_vocabularies.keep(pipeline, folder))
        return _train(session, hooks or folder_hooks)


def _check_device(pipeline: pb.Pipeline, processes: Processes) -> None:
    config.check_device(pipeline, processes.device.type)
    check_kernels(pipeline, processes.device.type)


def _take(folder: Path, stack: ExitStack) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not stack.enter_context(files.locked(folder / ".lock")):
        raise RecsysError(
            f"{folder}: another process is training in this folder; wait for it, end it, or give another "
            "--run-dir"
        )


def _train(session: Session, make_hooks: Callable[[Session], list[Hook]]) -> Outcome:
    run = describe(session)
    if reason := session.finish_reason():
        return _finished_before(session, run, reason)
    hooks = make_hooks(session) if session.processes.is_main else []
    if hooks:
        run = replace(run, baselines=_baselines(session.pipeline))
    try:
        for hook in hooks:
            hook.started(run)
        return Trainer(session, hooks).run()
    except torch.OutOfMemoryError as error:
        raise RecsysError(out_of_memory.explain(session, error)) from error
    finally:
        if session.validation is not None:
            session.validation.close()
        for hook in hooks:
            hook.close()


def _baselines(pipeline: pb.Pipeline) -> dict[str, dict[str, float]]:
    """Measures the baselines that are shown beside each evaluation. If there are none, the log says why."""
    reference = measure_reference(pipeline)
    if reference.skipped:
        log.info("no baselines beside the evaluations: %s", reference.skipped)
    return reference.metrics


def folder_hooks(session: Session) -> list[Hook]:
    """Makes the default hooks (metrics.jsonl, TensorBoard, report, console) and those in `train.hooks`."""
    from recsys.training.hooks.tensorboard import TensorBoard

    def items() -> Items | None:
        return frequent_items(session.pipeline, session.wrapped.state_dict())

    return [MetricsFile(), TensorBoard(items), Report(), *configured_hooks(session.pipeline), Console()]


def configured_hooks(pipeline: pb.Pipeline) -> list[Hook]:
    """Builds the hooks that a config lists in `train.hooks`."""
    chosen = [registry.pick(hook) for hook in pipeline.train.hooks]
    return [component.cls(component.config) for component in chosen]


def tell_hooks(pipeline: pb.Pipeline, folder: Path, split: str, evaluation: Evaluation) -> None:
    """Passes metrics of a saved state to the hooks that `train.hooks` lists. Call it on rank 0 only."""
    step = checkpoint.read_state(evaluation.checkpoint).progress.step
    for hook in configured_hooks(pipeline):
        hook.tested(SplitMetrics(folder, split, step, evaluation.metrics))


def describe(session: Session) -> Run:
    """Collects the facts that hooks receive when training starts."""
    processes, train = session.processes, session.pipeline.train
    averaged = {"evaluated": averaging.describe(train.weight_averaging)} if session.average else {}
    return Run(
        folder=session.folder,
        config_text=config.to_text(session.pipeline),
        first_step=session.progress.step,
        total_steps=session.total_steps,
        facts={
            "device": f"{processes.device}, {processes.world_size} process(es), "
            f"{torch.get_num_threads()} thread(s) each",
            "parameters": f"{sum(session.parameters.values()):,}",
        }
        | averaged,
        hyperparameters=hyperparameters(session.pipeline),
        splits=tuple(name for name in ("validation", "test") if session.pipeline.data.HasField(name)),
    )


def _finished_before(session: Session, run: Run, reason: str) -> Outcome:
    newest = session.checkpoints.steps()[-1]
    outcome = Outcome(session.progress.step, reason, newest, session.progress.best)
    log.info("nothing to do: %s", reason)
    for line in next_lines(outcome, run):
        log.info("%s", line)
    return outcome


def evaluate(
    pipeline: pb.Pipeline,
    folder: Path,
    processes: Processes,
    split: str,
    which: str,
    limit: int | None,
    compare: str | None = None,
) -> Evaluation:
    """Evaluates a saved state on a split. Collective.

    Args:
        pipeline: the resolved config.
        folder: the run folder.
        processes: this rank.
        split: "train", "validation" or "test".
        which: "best", "newest" or the number of a step.
        limit: the most batches that each rank reads; None reads all.
        compare: "exact" adds the share of the exactly best items that the model's search finds, "weights" the
            NDCG of other weights of a model that mixes scores, "popularity" metrics by how often training has
            seen the target.

    Raises:
        ConfigError: the config names no rows for the split, asks for something that the device cannot do,
            differs from the model that was trained, or has nothing to compare.
        DataError: the vocabularies are not those that the model was trained with.
    """
    if not pipeline.data.HasField(split):
        raise ConfigError(f"data.{split}: absent, so there is nothing to evaluate on")
    declared = model_of(pipeline)
    if compare == "exact" and not declared.finds_items:
        raise ConfigError(
            f"--compare-exact: it is for beam search, and this {declared.kind or 'model'} scores every item"
        )
    if compare == "weights" and not declared.mixes_scores:
        raise ConfigError(
            f"--compare-weights: it is for ids beside codes; {declared.kind or 'this model'} has one score"
        )
    if compare == "popularity" and declared.item_feature is None:
        raise ConfigError(
            f"--compare-popularity: it is for next-item models; {declared.kind or 'this model'} "
            "searches no items"
        )
    loaded = load_model(pipeline, folder, processes, which)
    loader = Loader.open(
        pipeline,
        split,
        layout_rule(pipeline),
        rank=processes.rank,
        world_size=processes.world_size,
        mode="evaluate",
    )
    recorder = evaluation_recorder_for(loaded.model, pipeline, processes.device, processes.world_size)
    metrics = evaluator.evaluate(loaded.model, loader, processes.device, limit, recorder=recorder)
    counts = evaluator.counted(loader)
    if compare is not None:
        sums = _compared_sums(compare, loaded.model, pipeline)
        compared = evaluator.ratios(loaded.model, sums, loader, processes.device, limit)
        if compare == "popularity":  # a group without targets has no metrics
            compared = {name: value for name, value in compared.items() if not math.isnan(value)}
        metrics |= compared
    return Evaluation(loaded.checkpoint, metrics, counts)


def _compared_sums(compare: str, model: Model, pipeline: pb.Pipeline) -> Callable[[Batch], dict[str, Tensor]]:
    """Returns the function whose sums over all batches `evaluate` adds to the metrics."""
    if compare == "popularity":
        groups = torch.from_numpy(popularity_groups(read_counts(pipeline)))
        return partial(popularity_sums, model, groups=groups)
    return model.exact_recall if compare == "exact" else model.weight_gains


def load_model(pipeline: pb.Pipeline, folder: Path, processes: Processes, which: str) -> LoadedModel:
    """Builds the model of a run with the weights of a saved state, its tables sharded in place. Collective.

    Args and Raises are those of `evaluate`.
    """
    _check_device(pipeline, processes)
    path = on_main(lambda: checkpoint.find(folder / CHECKPOINTS, which))
    require_same_model(checkpoint.read_state(path), pipeline, path)
    step = TrainStep(build_model(pipeline, whole=False))
    divided = pb.Pipeline()
    divided.CopyFrom(pipeline)
    # A plan is made for the number of processes that train.
    divided.train.ClearField("sharding_plan")
    wrapped = shard(step, pipeline, processes, plan_tables(step, divided, processes), draw=False)
    checkpoint.load_evaluated(path, wrapped.state_dict())
    return LoadedModel(path, step.model)
