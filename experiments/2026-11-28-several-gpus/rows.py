"""Writes rows and a vocabulary of many items for softmax.config: python rows.py FOLDER [--items 10000000]

16,384 rows of 20 to 200 events; item number n is drawn with a probability proportional to 1 / (n + 1).
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

ROWS, SHORTEST, LONGEST = 16384, 20, 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--items", type=int, default=10_000_000)
    options = parser.parse_args()
    random = np.random.default_rng(0)
    (options.folder / "vocabulary").mkdir(parents=True, exist_ok=True)
    ids = np.arange(options.items)
    parquet.write_table(
        pa.table({"id": ids, "count": options.items - ids}), options.folder / "vocabulary/item_id.parquet"
    )
    lengths = random.integers(SHORTEST, LONGEST + 1, ROWS)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    total = int(lengths.sum())
    items = np.minimum(np.exp(random.random(total) * np.log(options.items + 1)) - 1, options.items - 1)
    lists = {
        "uih_item_id": items.astype(np.int64),
        "uih_timestamps": 1_700_000_000 + np.concatenate([np.arange(length) for length in lengths]),
        "uih_actions": np.ones(total, np.int64),
    }
    columns = {name: pa.ListArray.from_arrays(offsets, pa.array(values)) for name, values in lists.items()}
    columns |= {"user_id": np.arange(ROWS), "request_time": np.full(ROWS, 1_800_000_000)}
    parquet.write_table(pa.table(columns), options.folder / "train.parquet", row_group_size=256)


if __name__ == "__main__":
    main()
