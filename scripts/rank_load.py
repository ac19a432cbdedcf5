#!/usr/bin/env python3
"""Measures how evenly row-wise sharding spreads the lookups of a config's training rows over ranks.

    .venv/bin/python scripts/rank_load.py --config configs/kuairand_ranking.config
    .venv/bin/python scripts/rank_load.py --config configs/ml_1m_hstu.config --ranks 2 16

Reads one epoch and counts how often each table row is looked up. Each figure is the busiest rank's lookups
over the mean of all ranks: `listed` for ids in the order of their vocabularies, `dealt` for ids spread over
the rows by `schema.row_layout`, as in sharded tables. `limit` is the figure that the most frequent row alone
causes; no order of rows comes below it.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import recsys.config as config
from recsys import protos as pb
from recsys.config import features
from recsys.data.loader import Loader
from recsys.data.schema.row_layout import ShardedRowLayout
from recsys.flags import Parser, positive
from recsys.models import layout_rule
from recsys.prepare.command import run


class Load(NamedTuple):
    """Lookups of the busiest rank over the mean of all ranks; see the head of this file."""

    listed: float
    dealt: float
    limit: float


def main(arguments: list[str] | None = None) -> None:
    """Prints one line per number of ranks and table, and one for all tables together."""
    parser = Parser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--config", required=True, metavar="FILE")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE")
    parser.add_argument("--ranks", type=positive, nargs="+", default=[8, 64])
    flags = parser.parse_args(arguments)
    # Count by rows in the order of vocabularies; `rank_load` spreads them.
    replicated = "model.embedding.placement=REPLICATED"
    pipeline = config.prepare(flags.config, [*flags.set, replicated]).pipeline
    lookups = count_lookups(pipeline)
    width = max(map(len, [*lookups, "all tables"]))
    print(f"ranks  {'table':{width}}      rows     lookups  listed   dealt   limit")
    for ranks in flags.ranks:
        for name, counts in [*lookups.items(), ("all tables", None)]:
            chosen = lookups if counts is None else {name: counts}
            load = rank_load(chosen, dealt_tables(pipeline), ranks)
            rows = sum(len(counts) for counts in chosen.values())
            total = sum(int(counts.sum()) for counts in chosen.values())
            print(
                f"{ranks:5}  {name:{width}}  {rows:8,}  {total:10,}  {load.listed:6.2f}  {load.dealt:6.2f}  "
                f"{load.limit:6.2f}"
            )


def count_lookups(pipeline: pb.Pipeline) -> dict[str, np.ndarray]:
    """Counts the lookups of each row in an epoch, without negatives: table -> int64 [rows]."""
    lookups = {table.name: np.zeros(table.rows, np.int64) for table in features.tables(pipeline)}
    for batch in Loader.open(pipeline, "train", layout_rule(pipeline)).epoch():
        for column in features.columns(pipeline):
            if column.table:
                rows = batch.ids[column.name].values().numpy()
                lookups[column.table] += np.bincount(rows, minlength=len(lookups[column.table]))
    return lookups


def dealt_tables(pipeline: pb.Pipeline) -> set[str]:
    """Names the tables whose ids have a vocabulary; rows of hashes and buckets stay where they are."""
    ids = [feature.id for feature in pipeline.features if feature.HasField("id")]
    return {id.table for id in ids if id.HasField("vocabulary")}


def rank_load(lookups: dict[str, np.ndarray], vocabularies: set[str], ranks: int) -> Load:
    """Computes the load of tables together, each cut into blocks of ceil(rows / ranks) rows, as in TorchRec.

    Args:
        lookups: table -> lookups of each row, ids in the order of their vocabulary.
        vocabularies: tables that have a vocabulary.
        ranks: number of ranks.
    """
    listed, dealt = np.zeros(ranks), np.zeros(ranks)
    for name, counts in lookups.items():
        block = -(-len(counts) // ranks)
        listed += np.bincount(np.arange(len(counts)) // block, weights=counts, minlength=ranks)
        order = ShardedRowLayout(len(counts) - 1, name if name in vocabularies else None)
        rows = np.append(0, order.row_of(np.arange(len(counts) - 1)))
        dealt += np.bincount(rows // block, weights=counts, minlength=ranks)
    hottest = max(int(counts.max()) for counts in lookups.values())
    mean = max(listed.mean(), 1e-9)
    return Load(listed.max() / mean, dealt.max() / mean, max(hottest / mean, 1.0))


if __name__ == "__main__":
    sys.exit(run(main))
