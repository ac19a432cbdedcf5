#!/usr/bin/env python3
"""How evenly row-wise sharding spreads the lookups of a config's training rows over ranks.

    .venv/bin/python scripts/rank_load.py --config configs/kuairand_ranking.config
    .venv/bin/python scripts/rank_load.py --config configs/ml_1m_hstu.config --ranks 2 16

Reads one epoch and counts how often each table row is looked up. A figure is the busiest rank's lookups over
the mean of all ranks, for ids in the order of their vocabularies and for ids dealt out over the rows, as
`schema.row_layout` does with sharded tables. `limit`: what the most frequent row alone is worth; no order
of rows comes below it.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from recsys import config
from recsys import protos as pb
from recsys.config import features
from recsys.data.loader import Loader
from recsys.data.schema.row_layout import ShardedRowLayout
from recsys.flags import Parser, positive
from recsys.models import layout_rule
from recsys.prepare.command import run


class Load(NamedTuple):
    """Lookups of the busiest rank over the mean of all ranks."""

    listed: float
    dealt: float
    limit: float


def main(arguments: list[str] | None = None) -> None:
    """Prints a line for each number of ranks and table, and one for all tables together."""
    parser = Parser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--config", required=True, metavar="FILE")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE")
    parser.add_argument("--ranks", type=positive, nargs="+", default=[8, 64])
    flags = parser.parse_args(arguments)
    # Vocabularies are read in their own order, and dealt out below.
    replicated = "model.embedding.placement=REPLICATED"
    pipeline = config.prepare(flags.config, [*flags.set, replicated]).pipeline
    lookups = count_lookups(pipeline)
    width = max(map(len, [*lookups, "all tables"]))
    print(f"ranks  {'table':{width}}      rows     lookups  listed   dealt   limit")
    for ranks in flags.ranks:
        for name, counts in [*lookups.items(), ("all tables", None)]:
            chosen = lookups if counts is None else {name: counts}
            load = rank_load(chosen, dealt_tables(pipeline), ranks)
            rows, total = (sum(int(f(one)) for one in chosen.values()) for f in (len, np.sum))
            print(
                f"{ranks:5}  {name:{width}}  {rows:8,}  {total:10,}  {load.listed:6.2f}  {load.dealt:6.2f}  "
                f"{load.limit:6.2f}"
            )


def count_lookups(pipeline: pb.Pipeline) -> dict[str, np.ndarray]:
    """Table -> int64 [rows], how often each row is looked up in an epoch; a retriever's negatives aside."""
    found = {table.name: np.zeros(table.rows, np.int64) for table in features.tables(pipeline)}
    for batch in Loader.open(pipeline, "train", layout_rule(pipeline)).epoch():
        for column in features.columns(pipeline):
            if column.table:
                rows = batch.ids[column.name].values().numpy()
                found[column.table] += np.bincount(rows, minlength=len(found[column.table]))
    return found


def dealt_tables(pipeline: pb.Pipeline) -> set[str]:
    """Tables whose ids have a vocabulary; rows that a hash or limits number stay where they are."""
    ids = [feature.id for feature in pipeline.features if feature.HasField("id")]
    return {one.table for one in ids if one.HasField("vocabulary")}


def rank_load(lookups: dict[str, np.ndarray], vocabularies: set[str], ranks: int) -> Load:
    """The load of some tables together, each cut into blocks of ceil(rows / ranks) rows, as TorchRec does.

    Args:
        lookups: table -> lookups of each row, ids in the order of their vocabulary.
        vocabularies: tables that have one.
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
