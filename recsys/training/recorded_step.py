"""Computes losses from looked-up vectors; in small models by replaying recorded CUDA graphs.

In a small model the GPU waits for Python, which launches hundreds of kernels one by one. A CUDA graph
launches them all at once. The lookup of sharded tables is not part of it; everything behind the lookup,
forward and backward, is recorded once for each of the few sizes that `padded_inputs` gives to batches. If no
table is sharded, the lookup is recorded, too. The clipping of gradients and the optimizer's step follow as a
further graph, if the optimizer can be recorded.

The random numbers of dropout come from the device's generator, which continues through replays just as
through ordinary steps. Batches run with padded inputs from the first step on, recorded or not, so a resumed
run computes what the run without a break computes.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from recsys import protos as pb
from recsys.config import features
from recsys.data.batch import Batch
from recsys.models.base import Model, layout_rule
from recsys.modules.embedding import LookedUp, vectors_of
from recsys.training.cuda_graphs import ForwardGraph, GraphMemory, StepGraph
from recsys.training.padded_inputs import Columns, PaddedInputs, Sizes
from recsys.training.totals import Totals, WeightedLoss, add_up

MOST_ENTRIES = 2**24
"""Steps are recorded up to this many entries of a full batch: tokens x width, and vectors of the catalogue.
Larger ones keep the GPU busy for longer than Python takes, and inputs are kept for each size. Near the limit,
HSTU-large on MovieLens-1M takes 7 ms a step (experiments/2026-11-28-recorded-steps)."""

MOST_GRAPHS = 64
"""Sizes beyond this number are not recorded. Graphs share their memory, except for their inputs."""

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Graph = TypeVar("Graph", bound=ForwardGraph[Any])


class TotalsOfVectors(nn.Module):
    """The part of a training step behind the lookup of embeddings: a model and its objective.

    The model is not a submodule: TorchRec's pipeline calls a module without sharded tables as it is, and does
    not trace the code in it.

    Attributes:
        transform: is applied to the looked-up vectors, column -> [ids, width]; None leaves them as they are.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.compute = _computing(model)
        self.transform: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None

    def forward(self, looked_up: LookedUp, batch: Batch) -> Totals:
        """Returns the totals of a batch, given its result of `EmbeddingGroup.look_up`."""
        return self.compute(self.transformed(vectors_of(looked_up)), batch)

    def transformed(self, vectors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the looked-up vectors as the model gets them."""
        return vectors if self.transform is None else self.transform(vectors)


def _computing(model: Model) -> Callable[[dict[str, Tensor], Batch], Totals]:
    def compute(vectors: dict[str, Tensor], batch: Batch) -> Totals:
        with model.embed.given(vectors) if vectors else nullcontext():
            return add_up(model.objective(model(batch), batch), batch.sample_weight)

    return compute


@dataclass
class HostBatch(Batch):
    """A batch that stays on the host: `Recorder` moves it to the device, into the memory that graphs read."""

    @classmethod
    def of(cls, batch: Batch) -> "HostBatch":
        """Makes one of another batch with the same tensors."""
        return cls(**vars(batch))

    def to(self, device: torch.device, non_blocking: bool = False) -> "HostBatch":
        """Returns itself, so that TorchRec's pipeline leaves it where it is."""
        return self

    def record_stream(self, stream: torch.Stream) -> None:
        """Does nothing: no stream uses host memory."""


class BatchRecorder(ABC, Generic[Result, Graph]):
    """Computes results of batches in padded inputs; records graphs of that, and replays them.

    A size is recorded when it occurs for the second time. If recording fails, the run continues without. A
    batch above `MOST_ENTRIES` is computed as it is: `data.max_candidates`, for example, may be absent.

    Args:
        model: the model, on its device.
        pipeline: the resolved config.
        record: False computes with padded inputs and records nothing, as a CPU must.
        memory: the memory of graphs; None for new memory.

    Attributes:
        record: whether further sizes will be recorded.
        failed: whether a recording has failed.
        looks_up: whether the lookup of embeddings is recorded, too: no table is sharded.
        memory: the memory of graphs.
    """

    subject, evaluates = "steps are", False
    """The subject of messages in logs, and whether batches are read for evaluation."""

    def __init__(
        self, model: Model, pipeline: pb.Pipeline, *, record: bool = True, memory: GraphMemory | None = None
    ) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        self._columns = Columns(pipeline, layout_rule(pipeline), evaluates=self.evaluates)
        self._width = pipeline.model.embedding_dim
        self._inputs: dict[Sizes, PaddedInputs] = {}
        self._graphs: dict[Sizes, Graph] = {}
        self._replayed: Graph | None = None
        self.record, self.failed = record, False
        self.looks_up = not any(table.sharded for table in features.tables(pipeline))
        self._groups = [] if self.looks_up else model.embed.groups()
        self.memory = memory or GraphMemory()

    @property
    def num_graphs(self) -> int:
        """The number of sizes that have been recorded."""
        return len(self._graphs)

    @abstractmethod
    def _compute(self, vectors: dict[str, Tensor], batch: Batch) -> Result:
        """Returns the result of a batch on the device; without vectors, it looks them up."""

    @abstractmethod
    def _record(self, compute: Callable[[], Result], rows: Sequence[Tensor]) -> Graph:
        """Records a graph of `compute`, which reads the looked-up vectors in these buffers.

        Raises:
            RuntimeError: it does what cannot be recorded.
        """

    def _transformed(self, rows: list[Tensor]) -> list[Tensor]:
        """Returns the looked-up vectors of each collection as the model gets them."""
        return rows

    def _unpadded(self, batch: Batch) -> Result:
        return self._compute({}, batch)

    def _result(self, batch: Batch) -> Result:
        """Returns the result of a batch on the host, fillers included if it was padded. The next result may
        overwrite it."""
        self._replayed = None
        if batch.sequences.total_len * self._width > MOST_ENTRIES:
            return self._unpadded(Batch.to(batch, self._device, non_blocking=True))
        sizes = self._columns.sizes(batch)
        inputs, is_new = self._inputs.get(sizes), sizes not in self._inputs
        if inputs is None:
            inputs = PaddedInputs(self._columns, sizes, batch, self._device, self._groups)
            if len(self._inputs) < MOST_GRAPHS:
                self._inputs[sizes] = inputs
        inputs.fill(batch)
        rows: list[Tensor] = []
        if not self.looks_up:
            rows = self._transformed(self._model.embed.rows(inputs.unpadded_ids(batch)))
        if self.record and not is_new and sizes not in self._graphs:
            self._add_graph(sizes, inputs)
        self._replayed = self._graphs.get(sizes)
        if self._replayed is not None:
            return self._replayed(*rows)
        return self._computed(inputs.place(rows), inputs)

    def _computed(self, rows: Sequence[Tensor], inputs: PaddedInputs) -> Result:
        return self._compute(inputs.vectors(rows), inputs.batch())

    def _add_graph(self, sizes: Sizes, inputs: PaddedInputs) -> None:
        """Records a graph for inputs of these sizes."""
        before = torch.cuda.get_rng_state()
        try:
            self._graphs[sizes] = self._record(lambda: self._computed(inputs.rows, inputs), inputs.rows)
        except RuntimeError as error:
            self._give_up(error)
        finally:
            torch.cuda.set_rng_state(before)

    def _give_up(self, error: RuntimeError) -> None:
        reason = str(error).strip().splitlines()[0]
        log.warning("%s not recorded as CUDA graphs, which would be faster: %s", self.subject, reason)
        self.record, self.failed = False, True


class Recorder(BatchRecorder[Totals, StepGraph]):
    """Records the graphs of a training run, and replays them.

    Args:
        behind: the part of the step behind the lookup of embeddings.
        model, pipeline, record: as for `BatchRecorder`.
    """

    def __init__(
        self, model: Model, behind: TotalsOfVectors, pipeline: pb.Pipeline, *, record: bool = True
    ) -> None:
        super().__init__(model, pipeline, record=record)
        self._behind, self._weigh = behind, WeightedLoss()
        # Gradients of replicated tables that are looked up outside of a graph lie elsewhere in every step.
        self._records_updates = self.looks_up or all(table.sharded for table in features.tables(pipeline))

    def totals(self, batch: Batch) -> Totals:
        """Returns the totals of a batch on the host, with a loss whose gradients reach all weights."""
        return self._result(batch)

    def _unpadded(self, batch: Batch) -> Totals:
        looked_up = [] if self.looks_up else self._model.embed.look_up(batch.ids)
        return self._weigh(self._behind(looked_up, batch))

    def _transformed(self, rows: list[Tensor]) -> list[Tensor]:
        # All tables of a collection are sharded, or none is, so that each stands for its other columns.
        names = [next(iter(group)) for group in self._groups]
        return list(self._behind.transformed(dict(zip(names, rows, strict=True))).values())

    def _compute(self, vectors: dict[str, Tensor], batch: Batch) -> Totals:
        return self._weigh(self._behind.compute(vectors, batch))

    def update(self, function: Callable[[], Tensor]) -> Tensor:
        """Calls a function that updates the weights, or replays it if the step's losses were a replay.

        Returns:
            The result of the function.
        """
        if self._replayed is None or not (self._records_updates or self._replayed.updates):
            return function()
        try:
            return self._replayed.update(function)
        except RuntimeError as error:
            self._records_updates = False
            self._give_up(error)
        return function()

    def _record(self, compute: Callable[[], Totals], rows: Sequence[Tensor]) -> StepGraph:
        parameters = self._parameters()
        with no_waiting():
            torch.autograd.grad(compute().loss, [*rows, *parameters], allow_unused=True)
        return StepGraph(compute, rows, parameters, self.memory.pool)

    def _parameters(self) -> list[nn.Parameter]:
        """Returns the parameters behind the lookup, and the tables if the lookup is recorded."""
        tables = set() if self.looks_up else set(self._model.embed.tables.parameters())
        return [p for p in self._model.parameters() if p not in tables and p.requires_grad]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raises RuntimeError where its block waits for the device, which no graph can."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def recorder_for(
    model: Model, behind: TotalsOfVectors, pipeline: pb.Pipeline, device: torch.device, world_size: int
) -> Recorder | None:
    """Returns the recorder of a run; None if its steps are not recorded. Logs why, if users may wonder."""
    if device.type != "cuda" or not pipeline.train.cuda_graphs:
        return None
    if most_entries(pipeline, pipeline.data.batch_size) > MOST_ENTRIES:
        return None
    if reason := _obstacle(model, pipeline, world_size):
        log.info("steps are not recorded as CUDA graphs: %s", reason)
        return None
    return Recorder(model, behind, pipeline)


def obstacle(model: Model, pipeline: pb.Pipeline, world_size: int) -> str:
    """Returns why neither steps nor evaluation of this run can be recorded; "" if nothing is known."""
    if world_size > 1:
        return "there are several processes"
    if layout_rule(pipeline).channels:
        return "the history is divided into channels"
    if model.embed.exchanges:
        return "a table is divided by columns within the process"
    return ""


def _obstacle(model: Model, pipeline: pb.Pipeline, world_size: int) -> str:
    """Returns why steps of this run cannot be recorded; "" if they can."""
    if reason := obstacle(model, pipeline, world_size):
        return reason
    if pipeline.train.accumulate_batches > 1:
        return "train.accumulate_batches is more than 1"
    if features.shared_columns(pipeline) and features.samples_negatives(pipeline):
        return "negatives are sampled, so their number differs from batch to batch"
    if not any(True for _ in model.embed.tables.parameters()):
        return "the model has no embedding tables"
    return ""


def most_entries(pipeline: pb.Pipeline, batch_size: int) -> int:
    """Returns the number of entries of a batch whose rows are all as long as they may be."""
    data, rule = pipeline.data, layout_rule(pipeline)
    tokens = rule.num_contextual + rule.tokens_per_event * data.max_history_len
    tokens += data.max_candidates if rule.targets else 0
    shared = features.table_rows(features.searched_item(pipeline)) if features.shared_columns(pipeline) else 0
    return (batch_size * tokens + shared) * pipeline.model.embedding_dim
