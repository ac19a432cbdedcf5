"""Builds all parts of a run from its config, and restores them if the run folder holds a saved state.

Only `open_session` combines model, sharded tables, optimizers, readers and saved state; `trainer` then only
drives them.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardedTensor

import recsys.config as config
from recsys import environment, files
from recsys import protos as pb
from recsys.config import features
from recsys.config.checks.effects import behind_the_end
from recsys.data import codes
from recsys.data.batch import Batch, Position
from recsys.data.convert import item_catalogue
from recsys.data.convert.batch_rows import BatchRows
from recsys.data.loader import Loader
from recsys.data.schema.vocabulary import fingerprints
from recsys.errors import ConfigError, RecsysError
from recsys.models import Model, build_model, layout_rule
from recsys.training import checkpoint, pretrained, warm_start
from recsys.training.averaging import WeightAverage
from recsys.training.balance import RowExchange
from recsys.training.checkpoint import CHECKPOINTS, Checkpoints
from recsys.training.distributed import Processes, collective_timeout, gather, on_main
from recsys.training.loss_scaling import LossScaler
from recsys.training.optimizers import ScheduledOptimizer
from recsys.training.recorded_evaluation import EvaluationRecorder, evaluation_recorder_for
from recsys.training.recorded_step import HostBatch, recorder_for
from recsys.training.resume import (
    changed_schedule,
    differences,
    require_same_config,
    require_same_inputs,
    saved_config,
)
from recsys.training.sharding import plan_tables, shard
from recsys.training.state import (
    Inputs,
    Progress,
    SavedState,
    capture_rng,
    restore_rng,
    seed_everything,
)
from recsys.training.train_step import TrainStep

log = logging.getLogger(__name__)


@dataclass
class Session:
    """A run that is ready for its next step.

    Attributes:
        pipeline: the resolved config.
        processes: this rank and its device.
        folder: the run folder.
        step: model and objective as one module.
        wrapped: the same module, wrapped for all ranks.
        train, validation: readers; `validation` is None if the config has no validation rows.
        checkpoints: the saved states of the run.
        progress: how far the run has come.
        total_steps: steps of the whole run.
        inputs: fingerprints of training files, vocabularies and items.
        parameters: number of learned parameters by part of the model, over all ranks.
        average: the average of the weights; None if the run does not average them.
        evaluation_recorder: replays graphs in evaluations; None computes every batch as it is.
    """

    pipeline: pb.Pipeline
    processes: Processes
    folder: Path
    step: TrainStep
    wrapped: DistributedModelParallel
    optimizer: ScheduledOptimizer
    train: Loader
    validation: Loader | None
    checkpoints: Checkpoints
    progress: Progress
    total_steps: int
    inputs: Inputs
    parameters: dict[str, int]
    average: WeightAverage | None
    evaluation_recorder: EvaluationRecorder | None

    @property
    def model(self) -> Model:
        """The model, its tables sharded in place."""
        return self.step.model

    @cached_property
    def _versions(self) -> dict[str, str]:
        """The versions of libraries in a saved state; reading them takes as long as a small step."""
        return environment.versions()

    @property
    def accumulate(self) -> int:
        """The number of batches per rank in one step."""
        return self.pipeline.train.accumulate_batches

    def batches(self) -> Iterator[Batch]:
        """Yields this rank's batches from the current position on, epoch after epoch without end."""
        with closing(self.train.epochs(self.progress.epoch, self.progress.next_batch)) as batches:
            yield from batches if self.step.recorder is None else map(HostBatch.of, batches)

    def advance(self, position: Position) -> None:
        """Moves the position in the data past a batch that was trained on."""
        self.progress.epoch, self.progress.next_batch = position.epoch, position.index + 1
        if self.progress.next_batch >= self.train.num_batches(position.epoch):
            self.progress.epoch, self.progress.next_batch = position.epoch + 1, 0

    def steps_to_epoch_end(self) -> int:
        """Returns the steps until the current epoch's last batch has been trained on, at least 1."""
        batches = self.train.num_steps(self.progress.epoch, self.progress.next_batch)
        return max(1, -(-batches // self.accumulate))

    def finish_reason(self) -> str:
        """Returns why there is no next step, such as "all 500 steps are done"; "" if there is a next step."""
        patience = self.pipeline.train.evaluation.patience
        if self.progress.step >= self.total_steps:
            return f"all {self.progress.step} steps are done"
        if patience and self.progress.evaluations_without_gain >= patience:
            return f"{patience} evaluations brought no improvement"
        return ""

    def save(self) -> Path:
        """Saves the whole state and returns its folder. Collective."""
        return self.checkpoints.save(self._tensors(), self._state())

    def prepare_saves(self) -> None:
        """Lets a thread allocate the host memory that `begin_save` copies the state to."""
        self.checkpoints.prepare(self._tensors())

    def begin_save(self) -> None:
        """Copies the whole state, which a thread writes while training goes on. Collective.

        Raises:
            RecsysError: the state before could not be written.
        """
        self.checkpoints.begin(self._tensors(), self._state())

    def _state(self) -> SavedState:
        return SavedState(
            progress=self.progress,
            rng=gather(capture_rng(self.processes.device)),
            inputs=self.inputs,
            config=config.to_text(self.pipeline),
            versions=self._versions,
            world_size=self.processes.world_size,
        )

    def restore(self, path: Path, state: SavedState) -> None:
        """Restores all but `progress` from a saved state, resharded to the current ranks. Collective."""
        checkpoint.load(path, self._tensors())
        self.optimizer.resume(self.progress.step, self.progress.earlier_batches)
        rank, device = self.processes.rank, self.processes.device
        if state.world_size == self.processes.world_size:
            try:
                restore_rng(state.rng[rank], device)
            except (ValueError, IndexError) as error:
                raise RecsysError(
                    f"{path / checkpoint.STATE}: damaged ({error}); remove {path} to resume from an "
                    "older state"
                ) from error
        else:
            seed_everything(_seed(self.pipeline, rank, self.progress.step))

    def start_warm(self) -> None:
        """Takes weights of the earlier run that `train.init_from` names, and reports them. Collective.

        Raises:
            ConfigError, DataError, RecsysError: as `warm_start.find_state` and `warm_start.load`.
        """
        # Its files are checked against their hashes, which may take longer than other ranks wait otherwise.
        find = partial(warm_start.find_state, self.pipeline.train.init_from)
        path = on_main(find, self.checkpoints.group())
        constants = {name for name, _ in self.wrapped.named_buffers()}
        states = self._optimizer_tensors()
        report = warm_start.load(self.pipeline, path, self.wrapped.state_dict(), constants, states)
        self.progress.earlier_batches = report.batches
        self.optimizer.resume(0, report.batches)
        if self.processes.is_main:
            for line in report.lines():
                log.info("%s", line)
        on_main(lambda: warm_start.write(report, self.folder))

    def moved(self) -> None:
        """Counts a finished step and updates the average of the weights."""
        self.progress.step += 1
        if self.average is not None:
            self.average.update(self.progress.step)

    def as_evaluated(self) -> AbstractContextManager[None]:
        """Gives the model the weights to evaluate within the block: their average, if there is one."""
        return nullcontext() if self.average is None else self.average.in_place(self.progress.step)

    def end(self) -> None:
        """Gives the model the weights to evaluate permanently; do not train or save it afterwards."""
        if self.average is not None:
            self.average.take_over(self.progress.step)
            self.average = None

    def load_weights(self, step: int) -> None:
        """Loads the weights to evaluate from the saved state of a step. Collective.

        Optimizers and progress do not change.

        Raises:
            RecsysError: there is no such state, or it is damaged.
        """
        path = on_main(lambda: checkpoint.find(self.checkpoints.folder, str(step)))
        checkpoint.load_evaluated(path, self.wrapped.state_dict())

    def _tensors(self) -> checkpoint.Tensors:
        """Returns the tensors of a checkpoint by name.

        Names of weights begin with `model.`, of averaged weights with `average.`, of optimizer states with
        `optimizer.`.
        """
        averages = {} if self.average is None else self.average.tensors(self.progress.step)
        return dict(self.wrapped.state_dict()) | averages | self._optimizer_tensors()

    def _optimizer_tensors(self) -> dict[str, Tensor | ShardedTensor]:
        return {warm_start.OPTIMIZER + name: tensor for name, tensor in self.optimizer.tensors().items()}


def open_session(
    pipeline: pb.Pipeline, folder: Path, processes: Processes, weights: Mapping[str, Tensor] | None = None
) -> Session:
    """Builds the run of a resolved config, or continues the run in `folder`. Collective.

    Args:
        pipeline: the resolved config.
        folder: the run folder.
        processes: this rank.
        weights: initial weights of a new run, by their names in the model; None draws them from `train.seed`.

    Raises:
        ConfigError: the folder holds a run of another config, or the data has too few batches for one step.
        DataError: a file cannot be used, or has changed since the state was saved.
        RecsysError: the saved state does not fit, or every state in the folder is damaged.
    """
    settings = pipeline.train.checkpoint
    checkpoints = Checkpoints(folder / CHECKPOINTS, settings.keep, settings.copy_to)
    saved = checkpoints.newest()
    state = checkpoint.read_state(saved) if saved else None
    earlier = saved_config(state, saved) if saved and state else pipeline
    if state:
        require_same_config(earlier, pipeline, str(folder))
    elif on_main(checkpoints.steps):
        raise RecsysError(f"every state in {checkpoints.folder} is damaged; train with another --run-dir")
    progress = state.progress if state else Progress()
    session = _build(pipeline, folder, processes, checkpoints, progress, weights, resumes=bool(saved))
    if saved and state:
        require_same_inputs(state.inputs, session.inputs)
        session.restore(saved, state)
        log.info("resuming from %s", saved)
        for line in differences(state, environment.versions(), processes.world_size):
            if processes.is_main:
                log.warning("%s", line)
        _warn_of_schedule(session, earlier.train)
    elif weights is None:
        pretrained.initialize(session.wrapped.state_dict(), pipeline)
        if pipeline.train.HasField("init_from"):
            session.start_warm()
    on_main(lambda: _write_config(folder, pipeline))
    return session


def _write_config(folder: Path, pipeline: pb.Pipeline) -> None:
    with files.naming_full_disk(folder):
        files.write_text(folder / config.FILE_NAME, config.to_text(pipeline))


def _warn_of_schedule(session: Session, earlier: pb.Train) -> None:
    before = _total_steps(earlier, session.train, session.progress)
    now, done = session.total_steps, session.progress.step
    line = changed_schedule(session.pipeline.train.schedule, done, before, now)
    if line and session.processes.is_main:
        log.warning("%s", line)


def _build(
    pipeline: pb.Pipeline,
    folder: Path,
    processes: Processes,
    checkpoints: Checkpoints,
    progress: Progress,
    weights: Mapping[str, Tensor] | None,
    *,
    resumes: bool,
) -> Session:
    train = pipeline.train
    seed_everything(train.seed)
    model = build_model(pipeline, whole=weights is not None)
    if weights is not None:
        model.load_state_dict(weights)
    parameters = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
    rule = layout_rule(pipeline)

    share = {"rank": processes.rank, "world_size": processes.world_size}
    reader = Loader.open(pipeline, "train", rule, shuffle=True, **share)
    validation = None
    if pipeline.data.HasField("validation"):
        validation = Loader.open(pipeline, "validation", rule, keep_readers=True, **share)
    total_steps = _total_steps(train, reader, progress)
    if train.HasField("num_epochs") and processes.is_main:
        for finding in behind_the_end(pipeline, total_steps):
            log.warning("%s: %s", finding.path, finding.text)
    if processes.world_size > 1 and features.divides_catalogue(pipeline):
        model.divide_catalogue(processes.rank, processes.world_size)
    step = TrainStep(model)
    plan = plan_tables(step, pipeline, processes, folder)
    wrapped = shard(step, pipeline, processes, plan, draw=not resumes)
    recorder = recorder_for(model, step.totals_of_vectors, pipeline, processes.device, processes.world_size)
    step.recorder = recorder
    memory = None if recorder is None else recorder.memory
    evaluations = evaluation_recorder_for(model, pipeline, processes.device, processes.world_size, memory)
    optimizer = ScheduledOptimizer(wrapped, train, total_steps, _scaler(step, pipeline, processes))
    if recorder is not None:
        optimizer.record(recorder.update)
    if train.balance_ranks and processes.world_size > 1:
        reader.exchange = _row_exchange(pipeline, model, reader)
    seed_everything(_seed(pipeline, processes.rank, 0))
    return Session(
        pipeline=pipeline,
        processes=processes,
        folder=folder,
        step=step,
        wrapped=wrapped,
        optimizer=optimizer,
        train=reader,
        validation=validation,
        checkpoints=checkpoints,
        progress=progress,
        total_steps=total_steps,
        inputs=Inputs(
            reader.source.marks(),
            fingerprints(pipeline),
            item_catalogue.fingerprint(pipeline),
            codes.fingerprint(pipeline),
        ),
        parameters=parameters,
        average=_average(wrapped, train),
        evaluation_recorder=evaluations,
    )


def _row_exchange(pipeline: pb.Pipeline, model: Model, reader: Loader) -> RowExchange:
    return RowExchange(
        BatchRows(pipeline, "train"),
        lambda arrays: model.flops(reader.collate(arrays)),
        reader.filler,
        reader.batch_size,
        # A group of its own, so that reading ahead does not mix with the other collectives of a step.
        dist.new_group(backend="gloo", timeout=collective_timeout(pipeline.train)),
    )


def _scaler(step: TrainStep, pipeline: pb.Pipeline, processes: Processes) -> LossScaler | None:
    if pipeline.model.precision != pb.FP16:
        return None
    sharded = [name for table in features.tables(pipeline) if table.sharded for name in table.columns]
    scaler = LossScaler(processes.device)
    scaler.watch(step.sum_over_ranks)
    step.totals_of_vectors.transform = scaler.dividing(sharded)
    return scaler


def _average(wrapped: DistributedModelParallel, train: pb.Train) -> WeightAverage | None:
    if not train.HasField("weight_averaging"):
        return None
    constants = {name for name, _ in wrapped.named_buffers()}
    return WeightAverage(wrapped.state_dict(), constants, train.weight_averaging)


def _seed(pipeline: pb.Pipeline, rank: int, step: int) -> int:
    """Returns a rank's seed from `step` on. Ranks have different seeds, so as not to drop the same units."""
    return (pipeline.train.seed * 1_000_003 + step) * 65_537 + rank + 1


def _total_steps(train: pb.Train, reader: Loader, progress: Progress) -> int:
    if train.HasField("num_steps"):
        return train.num_steps
    batches_left = 0
    for epoch in range(progress.epoch, train.num_epochs):
        batches_left += reader.num_steps(epoch, progress.next_batch if epoch == progress.epoch else 0)
    total = progress.step + batches_left // train.accumulate_batches
    if total == 0:
        raise ConfigError(
            f"train.accumulate_batches: a step takes {train.accumulate_batches} batches, "
            f"and train.num_epochs = {train.num_epochs} has {batches_left}"
        )
    return total
