"""A model as a function of flat tensors, which the exporter captures and a package runs.

`flatten` converts a batch to tensors in the order of `scoring_signature`; `ScoringGraph` reassembles it
inside the graph and scores it. All sizes follow from the shapes of the inputs, so no size in the graph
depends on values.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from recsys import protos as pb
from recsys.config import features
from recsys.config.declarations import model_of
from recsys.data.batch import Batch, LayoutRule
from recsys.models.base import Model, layout_rule
from recsys.models.signature import TensorSpec
from recsys.ops import SequenceLayout, offsets_from_lengths

ROWS, EVENTS, CANDIDATES, SEEN, LONGEST = "rows", "events", "candidates", "seen", "longest"
"""Names of dimensions: rows B, history events U, candidates N, seen items S, length of `steps`."""

SHORTEST = 2
"""The least bound on the length of a sequence, in tokens, since compilers specialize on sizes of 0 and 1."""

_SIZE = {pb.USER: ROWS, pb.HISTORY: EVENTS, pb.CANDIDATE: CANDIDATES}

_USUAL, _MANY = {ROWS: 40, CANDIDATES: 1000, LONGEST: 200}, 4000
"""Typical sizes of named dims and of all other dims, by which the compiler decides what to parallelize."""


def scoring_signature(pipeline: pb.Pipeline) -> list[TensorSpec]:
    """Describes the inputs of the scoring graph of a resolved pipeline, in order.

    First come embedded columns in the config's order (`<column>`: rows of its table), where a multi-valued
    column is followed by `<column>.counts`, the number of values of each row, event or candidate. Then come
    numeric columns by name, times, actions, lengths, and `steps`: `arange(longest sequence in tokens - 2)`,
    of which only the shape is read. A model that does not predict from candidates takes none of them. A model
    that finds items itself also takes those that rows have seen.
    """
    candidates = model_of(pipeline).reads_candidates("predict")
    used = [c for c in features.columns(pipeline) if candidates or c.side != pb.CANDIDATE]
    inputs = []
    for number, column in enumerate(used):
        size = _SIZE[column.side]
        if column.table is not None:
            values_size = f"values_{number}" if column.multi_valued else size
            inputs.append(TensorSpec(column.name, torch.int64, (values_size,)))
        if column.multi_valued:
            inputs.append(TensorSpec(f"{column.name}.counts", torch.int64, (size,)))
    for column in sorted(used, key=lambda column: column.name):
        if column.table is None:
            dims = (_SIZE[column.side], *map(str, column.batch_shape))
            inputs.append(TensorSpec(column.name, torch.float32, dims))
    inputs += [
        TensorSpec("request_time", torch.int64, (ROWS,)),
        TensorSpec("uih_lengths", torch.int64, (ROWS,)),
        TensorSpec("uih_timestamps", torch.int64, (EVENTS,)),
        TensorSpec("uih_actions", torch.int64, (EVENTS,)),
        TensorSpec("uih_watch_time", torch.float32, (EVENTS,)),
    ]
    for number, channel in enumerate(layout_rule(pipeline).channels):
        events = f"channel_{number}_events"
        inputs.append(TensorSpec(f"channel.{channel.name}.events", torch.int64, (events,)))
        inputs.append(TensorSpec(f"channel.{channel.name}.lengths", torch.int64, (ROWS,)))
    if candidates:
        inputs.append(TensorSpec("num_candidates", torch.int64, (ROWS,)))
        inputs.append(TensorSpec("candidate_timestamps", torch.int64, (CANDIDATES,)))
    if model_of(pipeline).finds_items:
        inputs.append(TensorSpec("seen", torch.int64, (SEEN,)))
        inputs.append(TensorSpec("seen_lengths", torch.int64, (ROWS,)))
    return [*inputs, TensorSpec("steps", torch.int64, (LONGEST,))]


def example_inputs(specs: Sequence[TensorSpec], device: torch.device) -> tuple[Tensor, ...]:
    """Returns tensors of zeros with a typical size for each named dim; all these sizes are different.

    A capture reads only the sizes. Real rows could have an empty list or a channel without events, and the
    compiler would specialize on that size.
    """
    names = sorted({name for spec in specs for name in spec.dims if not name.isdigit()})
    sizes = {name: _USUAL.get(name, _MANY) + place for place, name in enumerate(names)}
    return tuple(
        torch.zeros([sizes.get(name) or int(name) for name in spec.dims], dtype=spec.dtype, device=device)
        for spec in specs
    )


def inputs_of(batch: Batch, pipeline: pb.Pipeline) -> tuple[Tensor, ...]:
    """Returns the inputs of the scoring graph of a pipeline's model, in the order of `scoring_signature`."""
    return flatten(batch, with_seen=model_of(pipeline).finds_items)


def flatten(batch: Batch, *, with_seen: bool = False) -> tuple[Tensor, ...]:
    """Returns the inputs of a scoring graph for a batch, in the order of `scoring_signature`.

    Args:
        batch: the batch.
        with_seen: whether the graph takes the items that rows have seen.
    """
    searches_items = features.NEGATIVES in batch.ids.keys()
    of_items = (features.NEGATIVES, features.BATCH_ITEMS, features.LOG_WEIGHTS)

    def used(name: str) -> bool:
        prefixes = (features.PREFIX[pb.CANDIDATE], features.PREFIX[pb.ITEM])
        return not (searches_items and (name in of_items or name.startswith(prefixes)))

    tensors = []
    # Much faster than to take the columns out of the KeyedJaggedTensor one by one.
    columns = zip(batch.ids.keys(), batch.ids.values().split(batch.ids.length_per_key()), strict=True)
    for name, values in columns:
        if not used(name):
            continue
        # A column is a slice, but compiled code expects aligned addresses, which a clone has.
        tensors.append(values.clone())
        if name in batch.value_counts:
            tensors.append(batch.value_counts[name])
    tensors += [batch.numbers[name] for name in sorted(filter(used, batch.numbers))]
    tensors += [
        batch.request_time,
        batch.uih_lengths,
        batch.uih_timestamps,
        batch.uih_actions,
        batch.uih_watch_time,
    ]
    if batch.channel_layout is not None:
        for name, events in batch.channel_events.items():
            tensors += [events, batch.channel_lengths[name]]
    if not searches_items:
        tensors += [batch.num_candidates, batch.candidate_timestamps]
    if with_seen:
        tensors += [batch.seen, batch.seen_layout.lengths]
    return (*tensors, steps(batch.layout.max_len, batch.request_time.device))


def steps(longest: int, device: torch.device) -> Tensor:
    """Returns a tensor whose shape tells a graph the length of the longest sequence, in tokens."""
    return torch.arange(max(longest - SHORTEST, 0), device=device)


class ScoringGraph(nn.Module):
    """Runs `Model.score` on flat tensors: predictions [N, tasks] of candidates, or queries [B, E] of rows.

    A model that finds items returns their scores [B, K] and the items [B, K].

    Args:
        model: the model, in evaluation mode.
    """

    def __init__(self, model: Model):
        super().__init__()
        self.model = model
        self.names = [spec.name for spec in scoring_signature(model.pipeline)]
        self.assemble = Assemble(model.pipeline)

    def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Maps tensors in the order of `scoring_signature` to the result of `Model.score`."""
        answer = self.model.score(self.assemble(dict(zip(self.names, tensors, strict=True))))
        return answer if isinstance(answer, Tensor) else tuple(answer)


class Assemble:
    """Builds a batch from named tensors. Fields that no score depends on, such as labels, stay empty.

    The tensors of one side, users and events or else candidates, may be left out. The batch then has its rows
    without them, and contextual tokens only if there are users.

    Args:
        pipeline: the resolved config.
        has_users: False if there are events without users.
    """

    def __init__(self, pipeline: pb.Pipeline, *, has_users: bool = True):
        self.has_users = has_users
        self.columns = features.columns(pipeline)
        self.catalogue = features.columns(pipeline, pb.ITEM)
        self.rule = layout_rule(pipeline)
        self.shared = features.shared_columns(pipeline)

    def __call__(self, inputs: dict[str, Tensor]) -> Batch:
        """Returns the batch; `inputs` are named as in `scoring_signature`."""
        events = "request_time" in inputs
        users = events and self.has_users
        none = torch.zeros_like(inputs["request_time" if events else "num_candidates"])  # one per row
        nothing = none.new_zeros(0)
        rule = self.rule if users else replace(self.rule, num_contextual=0)
        uih_lengths = inputs.get("uih_lengths", none)
        num_candidates = inputs.get("num_candidates", none)
        uih_timestamps = inputs.get("uih_timestamps", nothing)
        candidate_timestamps = inputs.get("candidate_timestamps", nothing)
        sizes = {
            pb.USER: torch.ones_like(none) if users else none,
            pb.HISTORY: uih_lengths,
            pb.CANDIDATE: num_candidates,
        }
        columns = [*self.columns, *self.catalogue]
        counts = {c.name: inputs.get(f"{c.name}.counts", nothing) for c in columns if c.multi_valued}
        events = {c.name: inputs.get(f"channel.{c.name}.events", nothing) for c in rule.channels}
        lengths = {c.name: inputs.get(f"channel.{c.name}.lengths", none) for c in rule.channels}
        max_len = inputs["steps"].shape[0] + SHORTEST
        layout = partial(_layout, rule, num_candidates, candidate_timestamps, max_len=max_len)
        parts = [layout(lengths[name], events[name]) for name in events]
        real = nothing.to(torch.float32)
        return Batch(
            layout=layout(uih_lengths, uih_timestamps),
            channel_layout=SequenceLayout.join(parts) if parts else None,
            channel_events=events,
            channel_lengths=lengths,
            uih_lengths=uih_lengths,
            num_candidates=num_candidates,
            ids=self._ids(inputs, sizes, counts),
            value_counts=counts,
            numbers={
                c.name: inputs[c.name] if c.name in inputs else real.new_zeros(0, *c.batch_shape)
                for c in columns
                if c.table is None
            },
            request_time=inputs.get("request_time", none),
            uih_timestamps=uih_timestamps,
            uih_actions=inputs.get("uih_actions", nothing),
            uih_watch_time=inputs.get("uih_watch_time", real),
            candidate_timestamps=candidate_timestamps,
            labels={},
            sample_weight=torch.ones_like(none, dtype=torch.float32),
            group=none,
            seen=inputs.get("seen", nothing),
            seen_layout=_layout_of_seen(inputs) if "seen" in inputs else None,
        )

    def _ids(
        self, inputs: dict[str, Tensor], sizes: dict[int, Tensor], counts: dict[str, Tensor]
    ) -> KeyedJaggedTensor:
        rows = sizes[pb.USER].shape[0]
        values, lengths = {}, {}
        for column in self.columns:
            if column.table is not None:
                ids = inputs.get(column.name)
                values[column.name] = sizes[pb.USER].new_zeros(0) if ids is None else ids
                length = sizes[column.side]
                if column.multi_valued:
                    length = _sum_by_row(counts[column.name], length)
                lengths[column.name] = length
        for name in [*self.shared, *(c.name for c in self.catalogue if c.table is not None)]:
            values[name] = sizes[pb.USER].new_zeros(0)
            lengths[name] = torch.zeros_like(sizes[pb.USER])
        sizes_of_keys = [ids.shape[0] for ids in values.values()]
        return KeyedJaggedTensor(
            keys=list(values),
            values=torch.cat(list(values.values())),
            lengths=torch.cat(list(lengths.values())),
            stride=rows,
            length_per_key=sizes_of_keys,
            # TorchRec would compute these in the graph and read them back.
            offset_per_key=[0, *accumulate(sizes_of_keys)],
        )


def _layout(
    rule: LayoutRule,
    num_candidates: Tensor,
    candidate_timestamps: Tensor,
    uih_lengths: Tensor,
    events: Tensor,
    max_len: int,
) -> SequenceLayout:
    """Returns the layout of the sequences of the given events. Its totals come from the sizes of inputs."""
    targets = num_candidates if rule.targets else torch.zeros_like(num_candidates)
    total_targets = candidate_timestamps.shape[0] if rule.targets else 0
    lengths = uih_lengths * rule.tokens_per_event + targets + rule.num_contextual
    return SequenceLayout.trusted(
        lengths,
        offsets_from_lengths(lengths),
        targets,
        rule.num_contextual,
        total_len=events.shape[0] * rule.tokens_per_event
        + total_targets
        + rule.num_contextual * uih_lengths.shape[0],
        max_len=max_len,
        total_targets=total_targets,
    )


def _layout_of_seen(inputs: dict[str, Tensor]) -> SequenceLayout:
    seen, lengths = inputs["seen"], inputs["seen_lengths"]
    return SequenceLayout.trusted(
        lengths,
        offsets_from_lengths(lengths),
        torch.zeros_like(lengths),
        0,
        total_len=seen.shape[0],
        max_len=seen.shape[0],
        total_targets=0,
    )


def _sum_by_row(counts: Tensor, lengths: Tensor) -> Tensor:
    """Sums `counts`, the values of each entry, over the `lengths` entries of each row; int64 [B]."""
    starts = offsets_from_lengths(counts)
    return starts.index_select(0, offsets_from_lengths(lengths)).diff()
