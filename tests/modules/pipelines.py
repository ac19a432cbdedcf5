"""Two small pipelines and rows for them: what tests of modules and models share.

A `Row` is plain Python, so that a test can change one event or candidate of one row and an oracle can loop
over it; `batch_of` puts rows together the slow way.
"""

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from google.protobuf import text_format
from torchrec import KeyedJaggedTensor

from recsys import config
from recsys import protos as pb
from recsys.config import features
from recsys.config.declarations import model_of
from recsys.data.batch import Batch
from recsys.data.schema.layout_rule import Channel
from recsys.models import layout_rule
from recsys.ops import SequenceLayout
from tests.tools.bundles import write_codes

RANKER = """
data { max_history_len: 6  max_candidates: 4 }
features { name: "gender"  sides: USER  id { vocabulary { size: 3 }  embedding_dim: 4 } }
features { name: "age"  sides: USER  numeric { normalize {} } }
features { name: "item_id"  sides: [HISTORY, CANDIDATE]  id { vocabulary { size: 20 } } }
features {
  name: "tags"  sides: [HISTORY, CANDIDATE]
  id { hash { num_buckets: 7 }  embedding_dim: 4  multi_valued: true  pooling: MEAN }
}
features { name: "price"  sides: CANDIDATE  numeric { normalize {} } }
model {
  embedding_dim: 8
  embedding { init_std: 0.5 }
  ranker {
    preprocessor { contextual {
      content { hidden: 16 }
      action { bits { name: "click" bit: 0 } bits { name: "like" bit: 3 } watch_time_thresholds: [3, 10] }
      positional { num_time_buckets: 5 }
    } }
    mixer { hstu { num_heads: 2  qk_dim: 4  v_dim: 3  scale_len: 3  bias { num_time_buckets: 40 } } }
    postprocessor { layer_norm {} }
    head { fusion { mlp { hidden: 8 } } }
    tasks { name: "click"  loss { binary_cross_entropy {} }  metrics { auc {} } metrics { log_loss {} } }
    tasks { name: "seconds"  weight: 0.5  loss { mean_squared_error { log1p: true } }  metrics { mae {} } }
  }
}
"""

RETRIEVER = """
data { max_history_len: 6 }
features { name: "item_id"  sides: [HISTORY, CANDIDATE]  id { vocabulary { size: 20 } } }
model {
  embedding_dim: 8
  embedding { init_std: 0.5 }
  retriever {
    item_feature: "item_id"
    preprocessor { uih {
      action { bits { name: "click" bit: 0 } }
      positional {}
    } }
    mixer { hstu {
      num_heads: 2  qk_dim: 4  v_dim: 3  scale_len: 3  activation: UVQK  gate: UGN
      bias { num_time_buckets: 40 }
    } }
    loss { softmax { full {} } }
    metrics { hit_rate { k: 5 } }
    metrics { mrr {} }
  }
}
"""

# Items are described by a file of their own; 8 + 4 + 1 numbers.
TWO_TOWER = (
    RETRIEVER.replace("max_history_len: 6", 'max_history_len: 6  item_file: "items.parquet"')
    .replace("full {}", "in_batch { num_uniform: 5  log_q: false }")
    .replace('item_feature: "item_id"', 'item_feature: "item_id"  item_encoder { mlp { hidden: 6 } }')
    + """
features { name: "tags"  sides: ITEM
  id { hash { num_buckets: 7 }  embedding_dim: 4  multi_valued: true  pooling: MEAN } }
features { name: "price"  sides: ITEM  numeric { normalize {} } }
"""
)

# An item of 3 + 4 + 1 numbers instead of 13, which can be filled up to 16.
NARROW = RANKER.replace("vocabulary { size: 20 } }", "vocabulary { size: 20 } embedding_dim: 3 }")


def contextual(change: str) -> str:
    """A change of the ranker's preprocessor."""
    return f"model {{ ranker {{ preprocessor {{ contextual {{ {change} }} }} }} }}"


CHANNELS = """model { ranker {
  preprocessor { contextual {
    channels { name: "click"  bits: 0  max_events: 4 }
    channels { name: "like or long"  bits: [1, 3]  min_watch_time: 10 }
    channels { name: "all" }
  } }
  mixer { mixture {
    stacks { channel: "click"  hstu { num_layers: 1  num_heads: 2  qk_dim: 4  scale_len: 3 } }
    stacks { channel: "like or long"  hstu { num_layers: 1  num_heads: 2  qk_dim: 4  scale_len: 3 } }
    stacks { channel: "all"  hstu {
      qk_dim: 4  v_dim: 3  scale_len: 5  bias { num_time_buckets: 40 }
      layer_groups { num_layers: 1 }
      layer_groups { num_layers: 1  tail_len: 3 }
    } }
  } }
} }"""

RANKERS = {
    "plain": (RANKER,),
    "channels": (RANKER, CHANNELS),
    "interleaved channels": (RANKER, CHANNELS, contextual("action_placement: INTERLEAVED")),
    "interleaved": (RANKER, contextual("action_placement: INTERLEAVED")),
    "slice": (RANKER, contextual("content_slice {}")),
    "pad": (NARROW, "model { embedding_dim: 16 }", contextual("content_pad {}")),
    "joined": (RANKER, contextual("joined_contextual { num_tokens: 3  mlp { hidden: 6 } }")),
    "concatenated actions": (RANKER, contextual("action { concatenated { dim: 3  mlp { hidden: 5 } } }")),
    "contextualized": (
        RANKER,
        contextual("content_contextualized { context_dim: 6  hidden: 7  rank: 5 }"),
        contextual("action { concatenated { contextualized { context_dim: 4 } } }"),
    ),
    "all": (
        RANKER,
        contextual("action_placement: INTERLEAVED  joined_contextual {}  content_contextualized {}"),
        contextual("action { concatenated { contextualized { rank: 3 } } }"),
        "model { ranker { postprocessor { timestamp_layer_norm { utc_offset_minutes: 480 } } } }",
    ),
}
"""Rankers with other sequences: texts for `pipeline_of`."""

NOW = 1_700_000_000


def pipeline_of(text: str, *changes: str) -> pb.Pipeline:
    """A resolved pipeline; each change is text that is merged into the config."""
    pipeline = text_format.Parse(text, pb.Pipeline())
    for change in changes:
        text_format.Merge(change, pipeline)
    return config.resolve(pipeline, read_files=False).pipeline


@dataclass
class Row:
    """One row: times and actions, and a value for each column (a list of values on the other two sides)."""

    request_time: int
    uih_timestamps: list[int]
    uih_actions: list[int]
    uih_watch_time: list[float]
    candidate_timestamps: list[int]
    values: dict[str, Any]
    labels: dict[str, list[float]] = field(default_factory=dict)
    weight: float = 1.0
    group: int = 0

    def changed(self, **changes: Any) -> "Row":
        """A deep copy with other fields; a key that is a column goes into `values`."""
        row = copy.deepcopy(self)
        for name, value in changes.items():
            if hasattr(row, name):
                setattr(row, name, value)
            else:
                row.values[name] = value
        return row

    def with_events(self, keep: Sequence[int]) -> "Row":
        """Only these events, in this order."""
        row = copy.deepcopy(self)
        for name in ("uih_timestamps", "uih_actions", "uih_watch_time"):
            setattr(row, name, [getattr(self, name)[i] for i in keep])
        for name, value in self.values.items():
            if name.startswith("uih_"):
                row.values[name] = [value[i] for i in keep]
        return row

    def with_candidates(self, keep: Sequence[int]) -> "Row":
        """Only these candidates, in this order."""
        row = copy.deepcopy(self)
        row.candidate_timestamps = [self.candidate_timestamps[i] for i in keep]
        for name, value in self.values.items():
            if name.startswith("candidate_"):
                row.values[name] = [value[i] for i in keep]
        row.labels = {task: [labels[i] for i in keep] for task, labels in self.labels.items()}
        return row


def random_row(pipeline: pb.Pipeline, num_events: int, num_candidates: int, seed: int = 0) -> Row:
    """A row drawn from a seed; ids are at least 1, so that none is unknown."""
    draw = random.Random(seed)
    value = _draw_value(pipeline, draw)
    counts = {pb.HISTORY: num_events, pb.CANDIDATE: num_candidates}
    values = {}
    for column in features.columns(pipeline):
        count = counts.get(column.side)
        values[column.name] = value(column) if count is None else [value(column) for _ in range(count)]
    request_time = NOW + draw.randrange(10**6)
    tasks = [task.name for task in pipeline.model.ranker.tasks]
    return Row(
        request_time=request_time,
        uih_timestamps=sorted(request_time - int(10 ** draw.uniform(0, 6)) for _ in range(num_events)),
        uih_actions=[draw.randrange(16) for _ in range(num_events)],
        uih_watch_time=[draw.uniform(0, 15) for _ in range(num_events)],
        candidate_timestamps=[request_time + draw.randrange(3) * 1000 for _ in range(num_candidates)],
        values=values,
        labels={task: [float(draw.randrange(2)) for _ in range(num_candidates)] for task in tasks},
        group=seed,
    )


def _draw_value(pipeline: pb.Pipeline, draw: random.Random) -> Callable[[features.Column], Any]:
    """A function from a column to a value of it."""

    def value(column: features.Column) -> Any:
        if column.table is None:
            return draw.gauss(0, 1)
        if column.multi_valued:
            return [draw.randrange(features.table_rows(column.feature)) for _ in range(draw.randrange(4))]
        return draw.randrange(1, features.table_rows(column.feature))

    return value


def generator_pipeline(folder: Path, codes: np.ndarray, more: str = "") -> pb.Pipeline:
    """`RETRIEVER` with a generator in its place, for items 100 and up.

    Args:
        more: text to add, such as a feature with a table, of which codes have none.
        folder: gets the vocabulary and the bundle; the order of a bundle is not that of the vocabulary.
        codes: int64 [20, levels], below 4.
    """
    text = RETRIEVER.replace("retriever {", "generator {").replace("loss { softmax { full {} } }", "")
    pq.write_table(pa.table({"id": pa.array(range(100, 100 + len(codes)))}), folder / "item_id.parquet")
    order = np.random.default_rng(0).permutation(len(codes))
    write_codes(folder / "bundle", (100 + order).tolist(), codes[order], 4)
    vocabulary = f'vocabulary {{ size: {len(codes)} file: "{folder}/item_id.parquet" }}'
    text = text.replace(f"vocabulary {{ size: {len(codes)} }}", vocabulary)
    return pipeline_of(text + more, f'model {{ generator {{ bundle: "{folder}/bundle" }} }}')


def with_another_future(row: Row, later: Row, cut: int) -> Row:
    """Row with its first `cut` events and those of another row after them; of the later times only the next
    event's stays, which is known when its request comes.
    """
    return row.changed(
        uih_item_id=row.values["uih_item_id"][:cut] + later.values["uih_item_id"][cut:],
        uih_actions=row.uih_actions[:cut] + [1 - action % 2 for action in row.uih_actions[cut:]],
        uih_timestamps=row.uih_timestamps[: cut + 1] + later.uih_timestamps[cut + 1 :],
        request_time=later.request_time,
    )


def random_rows(pipeline: pb.Pipeline, sizes: Sequence[tuple[int, int]], seed: int = 0) -> list[Row]:
    """A row for each (events, candidates)."""
    return [random_row(pipeline, *size, seed=100 * seed + i) for i, size in enumerate(sizes)]


def batch_of(pipeline: pb.Pipeline, rows: Sequence[Row], negatives: Sequence[int] | None = None) -> Batch:
    """The batch of some rows; a retriever's negatives are the whole catalogue unless given."""
    rule = layout_rule(pipeline)
    uih_lengths = _ints([len(row.uih_timestamps) for row in rows])
    num_candidates = _ints([len(row.candidate_timestamps) for row in rows])
    targets = num_candidates if rule.targets else torch.zeros_like(num_candidates)

    def layout(events: torch.Tensor) -> SequenceLayout:
        history = rule.tokens_per_event * events
        return SequenceLayout(rule.num_contextual + history + targets, targets, rule.num_contextual)

    keys, values, lengths, counts, numbers = [], [], [], {}, {}
    for column in features.columns(pipeline):
        entries = [row.values[column.name] for row in rows]
        if column.side == pb.USER:
            entries = [[entry] for entry in entries]
        if column.table is None:
            numbers[column.name] = torch.tensor(sum(entries, []), dtype=torch.float32)
            continue
        if column.multi_valued:
            counts[column.name] = _ints([len(entry) for row in entries for entry in row])
            entries = [sum(row, []) for row in entries]
        keys.append(column.name)
        values += sum(entries, [])
        lengths += [len(row) for row in entries]
    channels, channel_lengths = {}, {}
    for channel in rule.channels:
        members = [_members(channel, row) for row in rows]
        starts = [sum(map(len, (row.uih_timestamps for row in rows[:n]))) for n in range(len(rows))]
        channels[channel.name] = _ints(
            [start + i for start, events in zip(starts, members, strict=True) for i in events]
        )
        channel_lengths[channel.name] = _ints([len(events) for events in members])
    if model_of(pipeline).item_feature is not None:
        count = features.table_rows(features.searched_item(pipeline))
        shared = {features.NEGATIVES: list(range(1, count)) if negatives is None else list(negatives)}
        if features.samples_negatives(pipeline):
            history = f"uih_{model_of(pipeline).item_feature}"
            seen = {item for row in rows for item in row.values[history] if item > 0}
            shared[features.BATCH_ITEMS] = sorted(seen) if negatives is not None else []
        known = [catalogue_item(pipeline, item) for items in shared.values() for item in items]
        for column in features.columns(pipeline, pb.ITEM):
            entries = [item[column.name] for item in known]
            if column.table is None:
                numbers[column.name] = torch.tensor(entries, dtype=torch.float32)
                continue
            if column.multi_valued:
                counts[column.name] = _ints([len(entry) for entry in entries])
                entries = sum(entries, [])
            shared[column.name] = entries
        for name, known_items in shared.items():
            keys.append(name)
            values += known_items
            lengths += [len(known_items)] + [0] * (len(rows) - 1)
    seen = [row.values.get("uih_item_id", []) for row in rows]
    wanted = [row.values.get("candidate_item_id", []) for row in rows]
    repeated = [item in known for items, known in zip(wanted, seen, strict=True) for item in items]
    return Batch(
        layout=layout(uih_lengths),
        seen=_ints(sum(seen, [])),
        seen_layout=SequenceLayout(_ints(list(map(len, seen)))),
        repeated=torch.tensor(repeated, dtype=torch.bool),
        channel_layout=SequenceLayout.join([layout(n) for n in channel_lengths.values()])
        if channels
        else None,
        channel_events=channels,
        channel_lengths=channel_lengths,
        uih_lengths=uih_lengths,
        num_candidates=num_candidates,
        ids=KeyedJaggedTensor(keys, _ints(values), lengths=_ints(lengths)),
        value_counts=counts,
        numbers=numbers,
        request_time=_ints([row.request_time for row in rows]),
        uih_timestamps=_ints(sum((row.uih_timestamps for row in rows), [])),
        uih_actions=_ints(sum((row.uih_actions for row in rows), [])),
        uih_watch_time=torch.tensor(sum((row.uih_watch_time for row in rows), []), dtype=torch.float32),
        candidate_timestamps=_ints(sum((row.candidate_timestamps for row in rows), [])),
        labels={
            task.name: torch.tensor(sum((row.labels[task.name] for row in rows), []), dtype=torch.float32)
            for task in pipeline.model.ranker.tasks
        },
        sample_weight=torch.tensor([row.weight for row in rows]),
        group=_ints([row.group for row in rows]),
    )


def catalogue_item(pipeline: pb.Pipeline, row: int) -> dict[str, Any]:
    """The features of the item in a row of the item table, by column of side ITEM."""
    value = _draw_value(pipeline, random.Random(row))
    return {column.name: value(column) for column in features.columns(pipeline, pb.ITEM)}


def _members(channel: Channel, row: Row) -> list[int]:
    """Events of a row that belong to a channel."""
    results = []
    for number, (actions, seconds) in enumerate(zip(row.uih_actions, row.uih_watch_time, strict=True)):
        by_bits = any(actions >> bit & 1 and channel.bits >> bit & 1 for bit in range(63))
        by_time = channel.min_watch_time is not None and seconds >= channel.min_watch_time
        if by_bits or by_time or (channel.bits == 0 and channel.min_watch_time is None):
            results.append(number)
    return results if channel.max_events is None else results[max(0, len(results) - channel.max_events) :]


def _ints(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)
