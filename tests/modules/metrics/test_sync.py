"""Two processes over gloo: each metric has the value of one process, also when a rank has no rows."""

import json
import math

import pytest
import torch
import torch.distributed as dist

import recsys.modules.metrics  # noqa: F401  (registers)
from recsys import protos as pb
from recsys.config import registry
from tests.modules.metrics.helpers import ORACLES, random_candidates
from tests.tools.forks import run_ranks

CASES = ("uneven", "rank 0 empty", "rank 1 never updates", "nobody has rows")


def shares(case: str) -> list[list[slice]]:
    """Row ranges of the batches of each rank."""
    return {
        "uneven": [[slice(0, 50), slice(50, 60)], [slice(60, 90)]],
        "rank 0 empty": [[slice(0, 0)], [slice(0, 40), slice(40, 90)]],
        "rank 1 never updates": [[slice(0, 90)], []],
        "nobody has rows": [[slice(0, 0)], []],
    }[case]


def compute_all(batches: list[slice]) -> dict[str, float]:
    data, ranks = random_candidates(90), torch.arange(1, 91)
    results = {}
    for kind, component in registry.registered(pb.Metric).items():
        metric = component.cls(component.config)
        for rows in batches:
            columns = data.take(rows) if kind in ORACLES else (ranks[rows], data.weights[rows])
            metric.update(*columns)
        # Twice: the synced state must not stay.
        results[kind] = [metric.compute().item(), metric.compute().item()]
    return results


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    actual = {case: compute_all(shares(case)[rank]) for case in CASES}
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(actual, file)
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sync")
    run_ranks(work, str(folder))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
@pytest.mark.parametrize("case", CASES)
def test_the_value_of_one_process(two_ranks, case):
    expected = compute_all([rows for rank in shares(case) for rows in rank])
    for actual in two_ranks:
        for kind, (value, _) in expected.items():
            for synced in actual[case][kind]:
                assert (
                    math.isclose(synced, value, rel_tol=1e-12) or math.isnan(synced) and math.isnan(value)
                ), kind


def test_a_process_that_is_alone_in_its_group_synchronizes_nothing(monkeypatch):
    """There is no group here, so a collective would raise an error."""
    expected = compute_all([slice(0, 50), slice(50, 90)])
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 1)
    actual = compute_all([slice(0, 50), slice(50, 90)])
    assert actual == {kind: pytest.approx(values, rel=0, nan_ok=True) for kind, values in expected.items()}
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    with pytest.raises(ValueError, match="process group"):
        compute_all([slice(0, 90)])
