"""Measures the baselines that training shows beside each evaluation, once and within seconds.

They are popularity and co-occurrence with its default settings, on the validation rows. `baselines.measure`
chooses the settings as well.
"""

from typing import NamedTuple

from recsys import protos as pb
from recsys.config.declarations import model_of
from recsys.evaluation.baselines import Popularity, metrics
from recsys.evaluation.co_occurrence import CoOccurrence, Settings, popularity
from recsys.evaluation.interactions import open_rows, read

MOST_ROWS = 100_000
"""Most training rows for which counting takes only seconds."""

MOST_ITEMS = 100_000
"""Most items for which scoring the whole catalogue takes only seconds."""

MOST_RANKED = 10_000
"""Most validation rows that are ranked; they are evenly spread over the split."""


class Reference(NamedTuple):
    """Metrics by baseline and name, and the reason if the baselines were not measured."""

    metrics: dict[str, dict[str, float]]
    skipped: str = ""


def measure_reference(pipeline: pb.Pipeline) -> Reference:
    """Measures the baselines of a model that searches items; any other model gets neither metrics nor reason.

    Args:
        pipeline: resolved.

    Raises:
        DataError: files are missing or do not fit the config.
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
