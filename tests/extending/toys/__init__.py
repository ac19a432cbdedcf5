"""Components that a test adds from outside: kinds of features, a mixer with a declaration, a head, a
preprocessor and a model.

Without docstrings and types, since the way in which they are added is what is tested.
"""

import zlib

import numpy as np
import torch
from torch import nn

from recsys import protos as pb
from recsys.config import features
from recsys.config.checks import Finding
from recsys.config.checks.values import COUNT, limit
from recsys.config.declarations import Choice, MixerDeclaration, ModelDeclaration
from recsys.config.feature_kinds import FeatureKind, Ragged, Values
from recsys.config.registry import declare, register
from recsys.data.batch import LayoutRule
from recsys.models.base import Model
from recsys.models.tasks import TaskLosses, TaskPredictions, task_metrics, task_rows
from recsys.modules.flops import linear_flops
from recsys.modules.mixers.base import AttentionUse, Mixer
from recsys.modules.preprocessors.preprocessed import Preprocessed
from recsys.modules.preprocessors.views import views
from recsys.modules.sequence import JaggedSequence
from recsys.ops import AttentionMask, gather_rows, softmax_attention
from recsys.ops.attention_args import AttentionFacts
from recsys.ops.softmax_attention import OP
from toys import toys_pb2 as toys

limit(toys.Words, {"num_buckets": COUNT, "embedding_dim": COUNT}, required=("num_buckets",))


@register(toys.Words)
class Words(FeatureKind):
    values = Values.TEXT
    multi_valued = True

    @property
    def table(self):
        return self.feature.name

    @property
    def rows(self):
        return self.config.num_buckets

    @property
    def width(self):
        return self.config.embedding_dim

    def choices(self, pipeline):
        yield Choice(self.config, self.path, "embedding_dim", 4, "default")

    def findings(self):
        if self.feature.name == "words":
            yield Finding(self.feature_path, "words is no name")

    def convert(self, columns, mapping):
        texts = [text.split() for text in columns[0].to_pylist()]
        hashes = [zlib.crc32(word.encode()) % self.rows for words in texts for word in words]
        return Ragged(np.array(hashes, np.int64), np.array([len(words) for words in texts], np.int64))


@register(toys.Mapped)
class Mapped(FeatureKind):
    values = Values.INTEGER
    width = 3

    @property
    def table(self):
        return self.feature.name

    @property
    def vocabulary(self):
        return self.config.vocabulary

    @property
    def rows(self):
        return self.vocabulary.size + 1

    @property
    def input_width(self):
        return self.config.table_dim

    def columns(self, side):
        return (features.PREFIX[side] + self.config.of,)

    def convert(self, columns, mapping):
        return mapping.map(columns[0])

    def module(self):
        return nn.Linear(self.input_width, self.width)


@register(toys.LinearHead)
class LinearHead(nn.Module):
    def __init__(self, config, *, embedding_dim, num_outputs):
        super().__init__()
        self.project = nn.Linear(embedding_dim, sum(num_outputs))

    def forward(self, user, item):
        return self.project(user * item)


limit(toys.TokenMixer, {"num_layers": COUNT, "num_heads": COUNT})


@declare(toys.TokenMixer)
class TokenDeclaration(MixerDeclaration):
    def choices(self):
        heads = self.model.embedding_dim // 8
        yield Choice(self.config, self.path, "num_heads", heads, "model.embedding_dim / 8")

    def findings(self):
        if self.config.num_heads and self.model.embedding_dim % self.config.num_heads:
            yield Finding(f"{self.path}.num_heads", "does not divide model.embedding_dim")


@register(toys.TokenMixer)
class TokenMixer(Mixer):
    def __init__(self, config, *, embedding_dim):
        super().__init__()
        self.num_heads = config.num_heads
        self.layers = nn.ModuleList(nn.Linear(embedding_dim, embedding_dim) for _ in range(config.num_layers))

    @classmethod
    def kernels(cls, config, path, model, device):
        width = model.embedding_dim // config.num_heads
        facts = AttentionFacts(
            device=device,
            dtype=torch.float32,
            num_heads=config.num_heads,
            qk_dim=width,
            v_dim=width,
            mask=AttentionMask(),
            needs_grad=True,
            deterministic=False,
        )
        yield AttentionUse(OP, path, "auto", facts)

    def forward(self, sequence):
        values = sequence.values
        for layer in self.layers:
            q = layer(values).unflatten(1, (self.num_heads, -1))
            values = values + softmax_attention(q, q, q, sequence.layout, AttentionMask()).flatten(1)
        return sequence.with_values(values)

    def flops(self, layout):
        return linear_flops(self, layout.total_len)


@register(toys.BarePreprocessor)
class BarePreprocessor(nn.Module):
    def __init__(self, config, *, pipeline):
        super().__init__()
        self.sides = [features.columns(pipeline, side) for side in (pb.HISTORY, pb.CANDIDATE)]
        self.project = nn.Linear(sum(column.width for column in self.sides[0]), pipeline.model.embedding_dim)

    @staticmethod
    def layout_rule(config, pipeline):
        return LayoutRule(num_contextual=0, targets=True)

    def forward(self, inputs, batch):
        history, candidates = (
            self.project(torch.cat([inputs[column.name] for column in side], dim=1)) for side in self.sides
        )
        (view,) = views(batch, 1)
        values = gather_rows(torch.cat([history, candidates]), view.index)
        return Preprocessed(
            JaggedSequence(values, batch.sequences, view.times[:, 0], view.times[:, 1]), candidates
        )

    def flops(self, batch):
        return linear_flops(self, batch.uih_timestamps.shape[0] + batch.candidate_timestamps.shape[0])


limit(toys.DotModel, {"width": COUNT}, required=("tasks",))


@declare(toys.DotModel)
class DotDeclaration(ModelDeclaration):
    has_targets = False

    def choices(self):
        width = self.pipeline.model.embedding_dim
        yield Choice(self.config, self.path, "width", width, "model.embedding_dim")

    def findings(self):
        if any(task.weight < 1 for task in self.tasks):
            yield Finding(f"{self.path}.tasks", "a dot weighs its tasks with at least 1")

    def warnings(self):
        if self.pipeline.data.max_candidates:
            yield Finding("data.max_candidates", "a dot can take any number")


@register(toys.DotModel)
class DotModel(Model):
    def __init__(self, config, *, pipeline):
        super().__init__(pipeline)
        self.columns = features.item_columns(pipeline)
        self.names = [column.feature.name for column in self.columns if column.table]
        total = sum(column.width for column in self.columns if column.table)
        self.project = nn.Linear(total, config.width)
        self.objective = TaskLosses(config.tasks)
        self.tasks = list(config.tasks)
        self.scale = nn.Linear(1, len(self.tasks))
        self.predict = TaskPredictions([task.name for task in config.tasks], self.objective.losses)

    @classmethod
    def layout_rule(cls, config, pipeline):
        return LayoutRule(num_contextual=0, targets=False)

    def forward(self, batch):
        embeddings = self.embed(batch)
        events, candidates = (
            self.project(torch.cat([embeddings[side + name] for name in self.names], dim=1))
            for side in ("uih_", "candidate_")
        )
        rows = torch.arange(batch.uih_lengths.shape[0], device=events.device)
        row_of_event = torch.repeat_interleave(rows, batch.uih_lengths, output_size=events.shape[0])
        sums = events.new_zeros(rows.shape[0], events.shape[1]).index_add(0, row_of_event, events)
        means = sums / batch.uih_lengths.clamp(min=1)[:, None]
        of_candidates = torch.repeat_interleave(
            means, batch.num_candidates, dim=0, output_size=candidates.shape[0]
        )
        dots = (of_candidates * candidates).sum(1, keepdim=True)
        return self.predict(self.scale(dots))

    def score(self, batch):
        return self(batch).scores()

    def flops(self, batch):
        return linear_flops(self.project, batch.uih_timestamps.shape[0] + batch.candidate_timestamps.shape[0])

    def metrics(self):
        return task_metrics(self.tasks)

    def metric_rows(self, outputs, batch):
        return task_rows(outputs, batch, self.tasks)
