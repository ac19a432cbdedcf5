"""`UihPreprocessor`: makes the sequence of a retrieval model, which is the history alone."""

import torch
from torch import Tensor, nn

from recsys import protos as pb
from recsys.config import features
from recsys.config.registry import register
from recsys.data.batch import Batch, LayoutRule
from recsys.modules.action import ActionEncoder
from recsys.modules.flops import linear_flops
from recsys.modules.mlp import build_mlp
from recsys.modules.positional import PositionalEncoder
from recsys.modules.preprocessors.preprocessed import Preprocessed
from recsys.modules.sequence import JaggedSequence, following


@register(pb.UihPreprocessor)
class UihPreprocessor(nn.Module):
    """Makes one token per event: the concatenated HISTORY features plus the action.

    The features are projected if the config says so or if they are not E wide.

    Args:
        config: the message, which configures the encoders.
        pipeline: the resolved config, for features and `model.embedding_dim` (E).

    Raises:
        ValueError: no feature has the side HISTORY.
    """

    def __init__(self, config: pb.UihPreprocessor, *, pipeline: pb.Pipeline):
        super().__init__()
        width = pipeline.model.embedding_dim
        columns = features.columns(pipeline, pb.HISTORY)
        if not columns:
            raise ValueError("no feature has the side HISTORY: there is nothing to make tokens of")
        self.columns = [column.name for column in columns]
        total = sum(column.width for column in columns)
        self.project: nn.Module = nn.Identity()
        if config.HasField("content"):
            self.project = build_mlp(config.content, total, width)
        elif total != width:
            self.project = nn.Linear(total, width)
        self.action = ActionEncoder(config.action, embedding_dim=width) if config.HasField("action") else None
        self.positional = None
        if config.HasField("positional"):
            self.positional = PositionalEncoder(config.positional, embedding_dim=width)
        self.dropout = nn.Dropout(config.dropout)
        self.knows_target_time = config.query_time == pb.UihPreprocessor.TARGET

    @staticmethod
    def layout_rule(config: pb.UihPreprocessor, pipeline: pb.Pipeline) -> LayoutRule:
        """Returns the layout of rows, which have neither contextual nor target tokens."""
        return LayoutRule(num_contextual=0, targets=False)

    def forward(self, inputs: dict[str, Tensor], batch: Batch) -> Preprocessed:
        """Makes the tokens of every history.

        The next timestamp of an event is the time that the query after it knows, as `query_time` sets.

        Args:
            inputs: column -> [n, width].
            batch: the batch, for numbers, times and actions.
        """
        joined = torch.cat([inputs[name] for name in self.columns], dim=1)
        values = self.project(joined).to(joined.dtype)
        if self.action is not None:
            values = values + self.action(batch.uih_actions, batch.uih_watch_time)
        times = batch.uih_timestamps
        after = times
        if self.knows_target_time:
            after = following(times, batch.uih_lengths, last=batch.request_time)
        if self.positional is not None:
            count = times.shape[0]
            request = torch.repeat_interleave(batch.request_time, batch.uih_lengths, output_size=count)
            values = self.positional(values, batch.layout, times, request_times=request)
        return Preprocessed(JaggedSequence(self.dropout(values), batch.layout, times, after))

    def flops(self, batch: Batch) -> int:
        """Counts the FLOP of a forward pass; see `recsys.modules.flops`."""
        events, rows = batch.uih_timestamps.shape[0], batch.layout.batch_size
        action = self.action.flops(events, rows) if self.action is not None else 0
        return linear_flops(self.project, events) + action
