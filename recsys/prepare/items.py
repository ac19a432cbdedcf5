"""`items.parquet`, what is known of each item of the catalogue: a row an item, `item_id` and its features.

`data.item_file` of a config names it; the item encoder of a retriever reads it.
"""

from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq

from recsys.prepare.rows import plain_table

ITEMS = "items.parquet"


def items_of(events: pl.DataFrame, features: Sequence[str]) -> pl.DataFrame:
    """The items of some events: `first`, the row of the input in which an item stands first, and its features
    as they were in its last event, at `time_us` and `order`.
    """
    chosen = events.sort("time_us", "order").group_by("item_id", maintain_order=True)
    return chosen.agg(pl.col("order").min().alias("first"), pl.col("time_us", "order", *features).last())


def join_items(parts: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """`items_of` all events from that of their parts, in the order of the input: item_id and features."""
    chosen = pl.concat(parts).sort("time_us", "order").group_by("item_id", maintain_order=True)
    joined = chosen.agg(pl.col("first").min(), pl.exclude("item_id", "first").last()).sort("first")
    return joined.drop("first", "time_us", "order")


def write_items(folder: Path, items: pl.DataFrame) -> None:
    """Writes the file: `item_id` and features under their names."""
    pq.write_table(plain_table(items), folder / ITEMS, compression="zstd", write_page_checksum=True)
