"""The training loop: next batch, step, maybe log, maybe evaluate, maybe save.

The parts are elsewhere: `train_step` turns a batch into a loss, `optimizers` update weights, `session` builds
and saves, and hooks show what happens. All ranks run the same loop. What only one rank knows (a signal, a
full disk, a loss that is not finite) reaches the others in the single sum of each step. On a GPU the loop
reads that sum one batch late, so that the host prepares a step while the device computes the one before.
Before results are shown or saved, all of them are read. A state is copied between two steps and written
during the next ones.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from recsys.data.batch import Batch, Position
from recsys.data.loader import Loader
from recsys.errors import NonFiniteLossError, RecsysError
from recsys.training.diagnostics import DiagnosticResults, Diagnostics
from recsys.training.evaluator import BestMetric, counted, evaluate
from recsys.training.heartbeat import TOGETHER, Heartbeat
from recsys.training.hooks import Diagnosed, Evaluated, Hook, Outcome, Trained
from recsys.training.session import Session
from recsys.training.signals import WRITE_FAILED, catching_signals
from recsys.training.state import Best, Window
from recsys.training.step_pipeline import StepPipeline
from recsys.training.throughput import Meter, peak_flop_per_s, peak_memory
from recsys.training.train_step import PendingResult

NUM_PICTURES = 4
"""Show the attention of this many samples."""

LATE_BATCHES = {"cuda": 1}
"""Number of batches that may be in flight before the loop reads a result, by kind of device; 0 by default."""

LONG_STOP = 1.0
"""Report a stop of training for a checkpoint from this many seconds."""

log = logging.getLogger(__name__)


class Trainer:
    """Trains a session to its end, or until a signal asks to stop.

    Args:
        session: the run to train.
        hooks: observers; empty on every rank but 0.

    Raises:
        ConfigError: `train.evaluation.best_metric` is not a metric of the model.
    """

    def __init__(self, session: Session, hooks: list[Hook]):
        self._session = session
        self._hooks = hooks
        self._best_metric = BestMetric.of(session.model, session.pipeline.train.evaluation)
        device, world_size = session.processes.device, session.processes.world_size
        self._meter = Meter(peak_flop_per_s(device), world_size)
        self._heartbeat = Heartbeat(session.processes, session.pipeline.train.rank_timeout)
        if session.train.exchange is not None:
            session.train.exchange.waiting = lambda: self._heartbeat.at(TOGETHER)
        self._pipeline = step_pipeline(session)
        self._batches: Iterator[Batch] | None = None
        self._unread: deque[tuple[int, PendingResult]] = deque()
        self._late = LATE_BATCHES.get(device.type, 0)
        self._evaluate_at = 0
        self._checkpoint: Path | None = None
        self._diagnosed: set[int] = set()
        self._signal = 0
        self._rates: dict[str, float] = {}
        self._history_lengths: list[Tensor] = []

    def run(self) -> Outcome:
        """Trains until the last step, the end of patience, or a signal, then saves the state. Collective.

        If another rank is stopped or stuck, the process ends with the exit code of LostProcessError.

        Raises:
            NonFiniteLossError: on all ranks. The weights that it changed are neither saved nor evaluated.
        """
        self._session.prepare_saves()
        stream = self._meter.watch(self._heartbeat.reading(self._session.batches()))
        received, announce = self._session.step.sum_over_ranks.received, self._session.processes.is_main
        with (
            closing(stream),
            catching_signals(received, announce=announce),
            self._heartbeat,
            self._finishing_checkpoint(),
        ):
            while not self._session.finish_reason() and not self._signal:
                self._heartbeat.step = self._session.progress.step + 1
                with self._heartbeat.at(TOGETHER):
                    position = self._train(stream)
                self._show_checkpoint(self._session.checkpoints.written())
                self._maybe_log(position)
                evaluated = self._maybe_evaluate()
                self._maybe_save(evaluated)
            self._show_checkpoint(self._session.checkpoints.wait())
            self._session.checkpoints.require_copied()
            self._session.end()
            self._maybe_diagnose_best()
        return self._outcome()

    @contextmanager
    def _finishing_checkpoint(self) -> Iterator[None]:
        """Lets a checkpoint that is being written become complete if an error ends the block."""
        try:
            yield
        except Exception:
            try:
                self._session.checkpoints.wait()
            except RecsysError as error:
                log.error("%s", error)
            raise

    def _train(self, stream: Iterator[Batch]) -> Position:
        """Trains one step: forward and backward on each of its batches, then the update of the weights.

        Returns:
            The position of the last batch in the data.
        """
        session, progress = self._session, self._session.progress
        if self._batches is None:
            # The pipeline reads ahead. It gets only the batches up to the next evaluation, so that it
            # is empty by then and the model can be called without it.
            self._evaluate_at = self._next_evaluation()
            self._pipeline.reset()
            self._batches = islice(stream, (self._evaluate_at - progress.step) * session.accumulate)
        self._rates = session.optimizer.learning_rates()
        received = session.step.sum_over_ranks.received
        received[WRITE_FAILED] = int(session.checkpoints.failed)
        position = Position()
        for _ in range(session.accumulate):
            try:
                result = self._pipeline.progress(self._batches)
            except StopIteration:
                raise RecsysError(
                    f"the reader of epoch {progress.epoch} ended before its last batch"
                ) from None
            self._history_lengths.append(result.history_lengths)
            position = result.position
            session.advance(position)
            self._unread.append((progress.step + 1, result))
            self._read_results(self._late)
        session.moved()
        if session.processes.world_size == 1:
            self._notice(received)
        for hook in self._hooks:
            hook.stepped(progress.step)
        return position

    def _read_results(self, late: int = 0) -> None:
        """Waits for the results of all batches but the last `late` ones and counts them.

        Raises:
            NonFiniteLossError: a loss is not finite; names the step.
        """
        progress = self._session.progress
        while len(self._unread) > late:
            step, pending = self._unread.popleft()
            try:
                result = pending.wait()
            except NonFiniteLossError as error:
                raise NonFiniteLossError(f"step {step}: {error}") from None
            progress.window.add(result.loss, result.losses, result.counts)
            progress.samples += result.samples
            self._meter.add(result.samples, result.tokens, result.flop)
            self._notice(result.signals)

    def _notice(self, signals: dict[int, int]) -> None:
        """Remembers a signal, so that the loop ends after this step.

        Raises:
            RecsysError: a checkpoint could not be written; on all ranks.
        """
        if signals[WRITE_FAILED]:
            self._session.checkpoints.wait()
        self._signal = self._signal or next((number for number, times in signals.items() if times), 0)

    def _next_evaluation(self) -> int:
        session, step = self._session, self._session.progress.step
        interval = session.pipeline.train.evaluation.every_steps
        following = (step // interval + 1) * interval if interval else step + session.steps_to_epoch_end()
        return min(following, session.total_steps)

    def _maybe_log(self, position: Position) -> None:
        session, progress = self._session, self._session.progress
        at_end = progress.step == session.total_steps
        if progress.step % session.pipeline.train.log_every_steps and not at_end:
            return
        self._read_results()
        rates = self._meter.take()
        batches_left = (session.total_steps - progress.step) * session.accumulate
        means, progress.window = progress.window.means(), Window()
        lengths, self._history_lengths = torch.cat(self._history_lengths), []
        record = Trained(
            step=progress.step,
            epoch=position.epoch,
            loss=means.loss,
            losses=means.losses,
            lr=self._rates,
            grad_norm=self._grad_norm(),
            rates=rates,
            seconds_left=batches_left / max(rates.batches_per_s, 1e-9),
            memory=peak_memory(session.processes.device),
            history_lengths=lengths,
            counts=means.counts,
        )
        for hook in self._hooks:
            hook.trained(record)

    def _maybe_evaluate(self) -> bool:
        session, progress = self._session, self._session.progress
        if progress.step < self._evaluate_at:
            return False
        self._batches = None
        self._read_results()
        if session.validation is None:
            return True
        began = time.perf_counter()
        with self._meter.paused():
            if isinstance(self._pipeline, TrainPipelineSparseDist):
                self._pipeline.detach()
            with session.as_evaluated():
                metrics, results = self._evaluate(session.validation, closely=self._is_last_evaluation())
        value = metrics[self._best_metric.metric]
        best = self._best_metric.reached(value, progress.best)
        progress.evaluations_without_gain = 0 if best else progress.evaluations_without_gain + 1
        if best:
            progress.best = Best(self._best_metric.metric, value, progress.step)
        counts = counted(session.validation)
        record = Evaluated(progress.step, metrics, best, time.perf_counter() - began, counts)
        for hook in self._hooks:
            hook.evaluated(record)
        self._report(results, progress.step)
        return True

    def _is_last_evaluation(self) -> bool:
        """Returns whether this may be the last evaluation: if patience is about to run out, a better value
        extends the run."""
        progress, patience = self._session.progress, self._session.pipeline.train.evaluation.patience
        at_end = progress.step == self._session.total_steps
        return at_end or bool(patience and progress.evaluations_without_gain + 1 >= patience)

    def _evaluate(self, rows: Loader, *, closely: bool) -> tuple[dict[str, float], DiagnosticResults | None]:
        model, processes = self._session.model, self._session.processes
        limit = self._session.pipeline.train.evaluation.max_batches or None
        pictures = NUM_PICTURES if processes.is_main else 0
        diagnostics = Diagnostics(model, processes.device, pictures) if closely else None
        with self._heartbeat.at("evaluating"):
            recorder = self._session.evaluation_recorder
            metrics = evaluate(model, rows, processes.device, limit, diagnostics, recorder)
        return metrics, None if diagnostics is None else diagnostics.results()

    def _report(self, results: DiagnosticResults | None, step: int) -> None:
        if results is not None:
            self._diagnosed.add(step)
            for hook in self._hooks:
                hook.diagnosed(Diagnosed(step, results))

    def _maybe_diagnose_best(self) -> None:
        """When a run finishes, loads the best state and evaluates it again, unless it was the last evaluated.

        Afterwards the model holds that state, which is also the one that is exported.
        """
        session, best = self._session, self._session.progress.best
        if self._signal or session.validation is None or best is None or best.step in self._diagnosed:
            return
        try:
            session.load_weights(best.step)
        except RecsysError as error:
            log.warning("the report covers only the last state; the best state cannot be loaded: %s", error)
            return
        log.info("evaluating the best state, step %d, again for the report", best.step)
        _, results = self._evaluate(session.validation, closely=True)
        self._report(results, best.step)

    def _maybe_save(self, evaluated: bool) -> None:
        session, progress = self._session, self._session.progress
        interval = session.pipeline.train.checkpoint.every_steps
        due = progress.step % interval == 0 if interval else evaluated
        improved = progress.best is not None and progress.best.step == progress.step
        if not (due or improved or session.finish_reason() or self._signal):
            return
        self._read_results()
        self._grad_norm()
        with self._meter.paused(), self._heartbeat.at("saving"):
            began = time.perf_counter()
            self._show_checkpoint(session.checkpoints.wait())
            session.begin_save()
            if (seconds := time.perf_counter() - began) >= LONG_STOP:
                log.info("step %d: training stood still for %.1f s to copy its state", progress.step, seconds)
        for hook in self._hooks:
            hook.copied(progress.step)

    def _show_checkpoint(self, path: Path | None) -> None:
        """Tells hooks about a checkpoint that has been written, if there is one."""
        if path is None:
            return
        self._checkpoint = path
        for hook in self._hooks:
            hook.saved(path)

    def _grad_norm(self) -> float:
        """Returns the gradient norm of the last step.

        Raises:
            NonFiniteLossError: the norm is not finite, which can happen although the loss is finite.
        """
        norm = self._session.optimizer.last_grad_norm
        value = 0.0 if norm is None else float(norm)
        if not math.isfinite(value):
            raise NonFiniteLossError(f"step {self._session.progress.step}: the gradient's norm is {value}")
        return value

    def _outcome(self) -> Outcome:
        session = self._session
        reason = f"signal {self._signal} stopped the run" if self._signal else session.finish_reason()
        outcome = Outcome(
            step=session.progress.step,
            reason=reason,
            checkpoint=self._checkpoint or session.checkpoints.steps()[-1],
            best=session.progress.best,
            signal=self._signal,
        )
        for hook in self._hooks:
            hook.finished(outcome)
        return outcome


def step_pipeline(session: Session) -> StepPipeline | TrainPipelineSparseDist:
    """Returns a pipeline that prepares the next batch during a step.

    TorchRec's also sends the ids of that batch to the ranks that hold the rows of sharded tables.
    """
    kind = TrainPipelineSparseDist if session.model.embed.exchanges else StepPipeline
    return kind(session.wrapped, session.optimizer, session.processes.device)
