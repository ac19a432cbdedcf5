"""Baselines that training shows beside each evaluation, measured once, in seconds, on the validation rows.

Popularity and co-occurrence with its default settings; `baselines.measure` chooses settings as well.
"""

from typing import NamedTuple

from recsys import protos as pb
from recsys.config.declarations import model_of
from recsys.evaluation.baselines import Popularity, metrics
from recsys.evaluation.co_occurrence import CoOccurrence, Settings, popularity
from recsys.evaluation.interactions import open_rows, read

MOST_ROWS = 100_000
"""Training rows up to which counting takes seconds."""

MOST_ITEMS = 100_000
"""Items up to which scoring the whole catalogue takes seconds."""

MOST_RANKED = 10_000
"""Validation rows that are ranked, evenly spread."""


class Reference(NamedTuple):
    """Metrics by baseline and name, and the reason if there are none."""

    metrics: dict[str, dict[str, float]]
    skipped: str = ""


def measure_reference(pipeline: pb.Pipeline) -> Reference:
    """Measures the baselines of a model that searches items; another model has none, and no reason.

    Args:
        pipeline: resolved.

    Raises:
        DataError: files that are missing or do not fit the config.
    """
    model = model_of(pipeline)
    if model.item_feature is None or not pipeline.data.HasField("validation"):
        return Reference({})
    num_rows = open_rows(pipeline, "train", "predict").source.num_rows
    if num_rows > MOST_ROWS:
        return Reference({}, f"{num_rows:,} training rows, and counting them takes longer than an evaluation")
    train = read(pipeline, "train")
    if train.num_items > MOST_ITEMS:
        return Reference({}, f"{train.num_items:,} items, and ranking them takes longer than an evaluation")
    rows = read(pipeline, "validation")
    rows = rows.select(slice(0, None, -(-len(rows.lengths) // MOST_RANKED) or 1))
    fitted = {
        "popularity": Popularity(popularity(train)),
        "co-occurrence": CoOccurrence.fit(train, Settings()),
    }
    return Reference(
        {name: metrics(baseline, rows, pipeline, model.seen_rule) for name, baseline in fitted.items()}
    )
