"""Measures the blend of a model with co-occurrence, and writes its recommendations, for `recsys.blend`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from recsys import files
from recsys import protos as pb
from recsys.config import features
from recsys.config.declarations import model_of
from recsys.data.schema.vocabulary import Vocabulary, mappings
from recsys.data.sources import open_source
from recsys.errors import ConfigError, DataError
from recsys.evaluation.blend import Blend, Queries, SearchModel, encode

NAME = "blend.json"
RECOMMENDATIONS = "recommendations.parquet"


class BlendReport(NamedTuple):
    """The weight of co-occurrence, which validation rows chose, and a split's metrics by model and name."""

    weight: float
    split: str
    metrics: dict[str, dict[str, float]]


def require_blendable(pipeline: pb.Pipeline) -> None:
    """Checks that a config has a model that searches items, and validation rows and a metric for the weight.

    Raises:
        ConfigError: names what is missing.
    """
    if model_of(pipeline).item_feature is None:
        raise ConfigError("model: co-occurrence ranks the catalogue, so the model must search items too")
    if model_of(pipeline).scores_items:
        raise ConfigError(
            f"model.{model_of(pipeline).kind}: a blend compares queries with vectors of items, and this "
            "model has none"
        )
    if not pipeline.data.HasField("validation"):
        raise ConfigError(
            "data.validation: not set, but the weight of the blend is chosen on validation rows"
        )
    if not pipeline.train.evaluation.best_metric:
        raise ConfigError("train.evaluation.best_metric: give the model a metric to choose the weight by")


def measure_blend(blend: Blend, pipeline: pb.Pipeline, split: str, rows: Queries) -> BlendReport:
    """Computes the metrics of a split for the model alone, co-occurrence alone, and the blend."""
    weights = {"model": 0.0, "co-occurrence": 1.0, "blend": blend.weight}
    values = blend.metrics(pipeline, rows, list(weights.values()))
    return BlendReport(blend.weight, split, dict(zip(weights, values, strict=True)))


def write_blend(folder: Path, checkpoint: str, blend: Blend, reports: Sequence[BlendReport]) -> Path:
    """Writes weight, settings and metrics into `folder` and returns the path of the file."""
    record = {
        "checkpoint": checkpoint,
        "weight": blend.weight,
        "co_occurrence": blend.settings._asdict(),
        "metrics": {report.split: report.metrics for report in reports},
    }
    files.write_text(folder / NAME, json.dumps(record, indent=1))
    return folder / NAME


def recommend(
    blend: Blend,
    pipeline: pb.Pipeline,
    model: SearchModel,
    device: torch.device,
    source: pb.Source,
    items: np.ndarray,
    folder: Path,
) -> Path:
    """Writes the best items of each row of a source: key columns, original ids of items, and scores.

    Args:
        blend: the fitted blend.
        pipeline: the resolved config, whose `predict` sets the number of items and whether those of the
            history are left out.
        model: the model, in evaluation mode.
        device: the model's device.
        source: the source of the rows.
        items: float32 [V, E], the model's vectors of the catalogue.
        folder: the folder in which RECOMMENDATIONS is written.

    Raises:
        DataError: a file is missing or does not fit the config.
    """
    asked = encode(pipeline, model, source, device, items)
    opened = open_source(source, pipeline)
    keys = list(pipeline.data.key_columns)
    table = pa.concat_tables([opened.read(group.file, group.number, keys) for group in opened.row_groups])
    if len(table) != len(asked.rows.lengths):
        raise DataError("rows were left out as bad, so recommendations cannot be matched with their keys")
    settings = pipeline.predict
    best, scores = blend.best_items(asked, settings.top_k, remove_seen=settings.remove_history)
    feature = features.searched_item(pipeline)
    vocabulary = mappings(pipeline)[feature.id.table]
    if not isinstance(vocabulary, Vocabulary):
        raise ConfigError(f"features {feature.name}: hashed ids cannot be turned back into items")
    kept = np.isfinite(scores)
    offsets = pa.array(np.concatenate([[0], np.cumsum(kept.sum(axis=1))]).astype(np.int32))
    ids = vocabulary.ids.take(pa.array(vocabulary.layout.id_of(best[kept])))
    table = table.append_column(feature.name, pa.ListArray.from_arrays(offsets, ids))
    values = pa.array(scores[kept].astype(np.float32))
    table = table.append_column(features.SCORE, pa.ListArray.from_arrays(offsets, values))
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f".{RECOMMENDATIONS}.partial"
    pq.write_table(table, aside)
    files.publish(aside, folder / RECOMMENDATIONS)
    return folder / RECOMMENDATIONS
