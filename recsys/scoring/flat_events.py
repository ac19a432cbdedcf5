"""Selects events of rows from the flat inputs of a scoring graph, to try `extend` on rows as they were."""

from collections.abc import Mapping

import torch
from torch import Tensor

from recsys import protos as pb
from recsys.config import features
from recsys.models.base import layout_rule
from recsys.ops import offsets_from_lengths
from recsys.scoring.signature import EVENTS, scoring_signature


def events_between(
    pipeline: pb.Pipeline, inputs: Mapping[str, Tensor], start: Tensor, stop: Tensor
) -> dict[str, Tensor]:
    """Returns the inputs of the same rows with events `start[b]` to `stop[b] - 1` of row b only.

    Args:
        pipeline: the resolved config.
        inputs: the inputs of the scoring graph by name, see `scoring_signature`, on the host.
        start, stop: int64 [B], with 0 <= start <= stop <= the number of events.
    """
    lengths = inputs["uih_lengths"]
    row = torch.repeat_interleave(lengths)
    place = torch.arange(len(row)) - offsets_from_lengths(lengths)[row]
    kept = (place >= start[row]) & (place < stop[row])
    selected = dict(inputs)
    for spec in scoring_signature(pipeline):
        if spec.dims[0] == EVENTS:
            selected[spec.name] = inputs[spec.name][kept]
    for column in features.columns(pipeline, pb.HISTORY):
        if column.multi_valued and column.table is not None:
            is_value_kept = torch.repeat_interleave(kept, inputs[f"{column.name}.counts"])
            selected[column.name] = inputs[column.name][is_value_kept]
    selected["uih_lengths"] = stop - start
    number = kept.cumsum(0) - 1
    for channel in layout_rule(pipeline).channels:
        name = f"channel.{channel.name}"
        events = inputs[f"{name}.events"]
        in_channel = kept[events]
        per_row = torch.bincount(row[events[in_channel]], minlength=len(lengths))
        selected |= {f"{name}.events": number[events[in_channel]], f"{name}.lengths": per_row}
    return selected
