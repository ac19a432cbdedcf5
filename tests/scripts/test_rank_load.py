"""The busiest rank's share of lookups, against loops over rows."""

import numpy as np
import pytest

from recsys.data.schema.row_layout import ShardedRowLayout
from scripts import rank_load

KUAIRAND = "configs/quickstart.config"


def busiest(counts: dict[str, list[int]], ranks: int) -> float:
    """Over the mean: rank r has the rows from r * block on, block = ceil(rows / ranks)."""
    loads = [0] * ranks
    for rows in counts.values():
        block = -(-len(rows) // ranks)
        for row, count in enumerate(rows):
            loads[row // block] += count
    return max(loads) / (sum(loads) / ranks)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_loads(ranks):
    draw = np.random.default_rng(3)
    lookups = {"a": np.sort(draw.zipf(1.5, 50))[::-1], "b": draw.integers(1, 9, 21), "c": np.array([4, 1, 0])}
    moved = {name: counts.tolist() for name, counts in lookups.items()}
    for name in ("a", "c"):
        rows = ShardedRowLayout(len(lookups[name]) - 1, name).row_of(np.arange(len(lookups[name]) - 1))
        for place, row in enumerate(rows.tolist()):
            moved[name][row] = int(lookups[name][1 + place])
    actual = rank_load.rank_load(lookups, {"a", "c"}, ranks)
    assert actual.listed == pytest.approx(busiest(lookups, ranks))
    assert actual.dealt == pytest.approx(busiest(moved, ranks))
    hottest = max(int(counts.max()) for counts in lookups.values())
    total = sum(int(counts.sum()) for counts in lookups.values())
    assert actual.limit == pytest.approx(max(1, hottest * ranks / total))


def test_the_tool_counts_every_lookup(capsys):
    paths = 'data.train.parquet.paths=["tests/data/kuairand/validation.parquet"]'
    rank_load.main(["--config", KUAIRAND, "--ranks", "4", "--set", "data.num_workers=0", "--set", paths])
    header, *lines = capsys.readouterr().out.strip().splitlines()
    assert header.split() == ["ranks", "table", "rows", "lookups", "listed", "dealt", "limit"]
    cells = {line.split()[1]: line.replace(",", "").split() for line in lines}
    # A table read by one column of the rows is looked up once a row.
    assert int(cells["hour"][3]) == int(cells["user_active_degree"][3])
    assert int(lines[-1].replace(",", "").split()[4]) == sum(
        int(cells[name][3]) for name in cells if name != "all"
    )
