"""A ranker in float64, weights that depend on nothing but their names, and a config as its user writes it."""

import dataclasses
import zlib
from collections.abc import Sequence
from functools import partial

import torch
from google.protobuf import text_format
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor
from torchrec.modules.embedding_modules import EmbeddingCollection

from recsys import config
from recsys import protos as pb
from recsys.data.batch import Batch
from recsys.models import Model, build_model
from tests.modules.pipelines import Row, batch_of


def written(text: str, *changes: str) -> pb.Pipeline:
    """A config that nothing was filled in of; each change is text that is merged into it."""
    pipeline = text_format.Parse(text, pb.Pipeline())
    for change in changes:
        text_format.Merge(change, pipeline)
    return pipeline


def resolved(pipeline: pb.Pipeline) -> pb.Pipeline:
    return config.resolve(pipeline, read_files=False).pipeline


def build(pipeline: pb.Pipeline) -> Model:
    """The model of a written config in evaluation, float64.

    A weight depends on its name and shape only, so models that differ in a feature differ in nothing else.
    """
    model = build_model(resolved(pipeline)).double().eval()
    for name, parameter in model.named_parameters():
        numbers = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=numbers, dtype=torch.float64) / 2)
    for module in model.modules():
        if isinstance(module, EmbeddingCollection):
            # TorchRec's own lookup answers in float32, whatever the tables are.
            module.forward = partial(_look_up, module)
    return model


def _look_up(collection: nn.Module, ids: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
    return {
        name: JaggedTensor(
            collection.embeddings[table.name].weight[ids[name].values()], lengths=ids[name].lengths()
        )
        for table in collection.embedding_configs()
        for name in table.feature_names
    }


def batch(pipeline: pb.Pipeline, rows: Sequence[Row]) -> Batch:
    """The batch of some rows for the model of a written config."""
    actual = batch_of(resolved(pipeline), rows)
    return dataclasses.replace(actual, numbers={name: x.double() for name, x in actual.numbers.items()})


def predictions(pipeline: pb.Pipeline, actual: Tensor) -> Tensor:
    """Converts logits [N, tasks] to probabilities, or to values in the unit of the label."""
    columns = []
    for task, column in zip(pipeline.model.ranker.tasks, actual.unbind(1), strict=True):
        if task.loss.HasField("binary_cross_entropy"):
            column = 1 / (1 + torch.exp(-column))
        elif task.loss.mean_squared_error.log1p:
            column = torch.clamp(torch.exp(column) - 1, min=0)
        columns.append(column)
    return torch.stack(columns, dim=1)


def logits(model: Model, pipeline: pb.Pipeline, rows: Sequence[Row]) -> Tensor:
    """[N, tasks], float64."""
    return model(batch(pipeline, rows)).logits
