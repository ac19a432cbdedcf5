"""Makes `items.parquet`, the features of all items of the catalogue: one row per item, `item_id` first.

`data.item_file` of a config names the file, and the item encoder of a retriever reads it.
"""

from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq

from recsys.prepare.dataset_writer import plain_table

ITEMS = "items.parquet"

FIRST = ".first"
"""Column with the row of the input in which an item occurs first; no feature has this name."""


def items_of(events: pl.DataFrame, features: Sequence[str]) -> pl.DataFrame:
    """Returns the items of events, with the features of each item's last event.

    The columns are item_id, `FIRST`, time_us and order of the last event, and the features.
    """
    chosen = events.sort("time_us", "order").group_by("item_id", maintain_order=True)
    return chosen.agg(pl.col("order").min().alias(FIRST), pl.col("time_us", "order", *features).last())


def join_items(parts: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Joins the items of all parts of a log, as `items_of` returns them: item_id and features, in the order
    of the input."""
    chosen = pl.concat(parts).sort("time_us", "order").group_by("item_id", maintain_order=True)
    joined = chosen.agg(pl.col(FIRST).min(), pl.exclude("item_id", FIRST).last()).sort(FIRST)
    return joined.drop(FIRST, "time_us", "order")


def write_items(folder: Path, items: pl.DataFrame) -> None:
    """Writes `items.parquet` into `folder`."""
    pq.write_table(plain_table(items), folder / ITEMS, compression="zstd", write_page_checksum=True)
