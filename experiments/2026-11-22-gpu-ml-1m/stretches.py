"""Ten copies of training rows in which a history of over 200 events is in half of them another stretch.

    python experiments/2026-11-22-gpu-ml-1m/stretches.py data/ml-1m/train.parquet FOLDER

Train on `--set 'data.train.parquet.paths=["FOLDER/part-*.parquet"]' --set data.find_duplicates=false`, for
as many steps.
"""

import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

LENGTH, COPIES, SHARE = 200, 10, 0.5


def main(source: str, folder: str) -> None:
    table = pq.read_table(source).combine_chunks()
    lists = {name: table[name].combine_chunks() for name in ("uih_item_id", "uih_timestamps", "uih_actions")}
    offsets = lists["uih_timestamps"].offsets.to_numpy()
    flat = {name: column.values.to_numpy() for name, column in lists.items()}
    lengths, times, request_time = np.diff(offsets), flat["uih_timestamps"], table["request_time"].to_numpy()
    newest, kept = np.maximum(lengths - LENGTH, 0), np.minimum(lengths, LENGTH)
    rows = np.cumsum(kept) - kept
    random = np.random.default_rng(0)
    for copy in range(COPIES):
        drawn = np.floor(random.random(len(newest)) * (newest + 1)).astype(np.int64)
        start = np.where(random.random(len(newest)) < SHARE, drawn, newest)
        begin = offsets[:-1] + start
        place = np.repeat(begin - rows, kept) + np.arange(kept.sum())
        # What comes behind a stretch is asked for when the next event happens.
        following = times[np.minimum(begin + kept, len(times) - 1)]
        asked = np.where(start == newest, request_time, following)
        columns = {"user_id": table["user_id"], "request_time": asked}
        ends = np.concatenate([[0], np.cumsum(kept)]).astype(np.int32)
        columns |= {name: pa.ListArray.from_arrays(ends, values[place]) for name, values in flat.items()}
        pq.write_table(pa.table(columns), f"{folder}/part-{copy}.parquet", row_group_size=1024)


if __name__ == "__main__":
    main(*sys.argv[1:])
