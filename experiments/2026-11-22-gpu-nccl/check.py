"""Trainings whose result does not depend on the number of ranks, and the comparison of what came out.

    python experiments/2026-11-22-gpu-nccl/check.py jobs FOLDER 1 2 4
    torchrun --standalone --nproc-per-node N -m tests.integration.ranks FOLDER/jobs-N.json
    python experiments/2026-11-22-gpu-nccl/check.py compare FOLDER 1 2 4

The first writes FOLDER/jobs-N.json; the second is for each number of ranks, for one without torchrun.

The runs are those of tests/integration/test_distributed.py, in which two gloo processes agree with one to
1e-6: nothing is drawn, and the N batches of a step are the one batch of a single process. In `uneven`, ranks
run out of rows at different steps, and every rank has another number of candidates.
"""

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.integration import test_distributed as tests
from tests.integration.runs import records

STEPS = ("train.num_steps=24", "train.evaluation.every_steps=12", "train.checkpoint.every_steps=12")
BATCH, EVALUATED = 32, 64


def jobs(folder: Path, ranks: int) -> list[dict]:
    """The runs for a number of ranks."""
    rows = folder / "rows.parquet"
    if not rows.exists():
        whole = pq.read_table("tests/data/kuairand/train.parquet").slice(0, 72)
        pq.write_table(whole, rows, row_group_size=72)
    uneven = (f'data.train.parquet.paths=["{rows}"]', f'data.validation.parquet.paths=["{rows}"]')
    variants = (
        {"sharded": ()} | tests.VARIANTS | {"uneven": uneven, "uneven_rows": (*uneven, *tests.OVER_ROWS)}
    )
    sizes = (f"data.batch_size={BATCH // ranks}", f"data.eval_batch_size={EVALUATED // ranks}")
    return [
        {"folder": str(folder / str(ranks) / name), "overrides": [*tests.STILL, *STEPS, *extra, *sizes]}
        for name, extra in variants.items()
    ]


def distance(one: dict, other: dict) -> float:
    """The largest relative difference of numbers of the same name; infinite where names differ."""
    if one.keys() != other.keys():
        return float("inf")
    pairs = [(one[key], other[key]) for key in one if one[key] is not None and one[key] == one[key]]
    return max((abs(a - b) / max(abs(a), 1e-12) for a, b in pairs), default=0.0)


def compare(folder: Path, ranks: list[int]) -> list[dict]:
    """For each run and number of ranks, how far it is from that of the first number."""
    found = []
    for job in jobs(folder, ranks[0]):
        name = Path(job["folder"]).name
        for number in ranks[1:]:
            line: dict = {"run": name, "ranks": number}
            for kind, keys in (("train", ("losses", "grad_norm")), ("evaluation", ("metrics",))):
                one, other = (records(folder / str(n) / name, kind) for n in (ranks[0], number))
                steps = sorted(one.keys() & other.keys())
                line[f"{kind}_steps"] = [len(one), len(other)]
                for key in keys:
                    values = [[r[s][key] for s in steps] for r in (one, other)]
                    as_dicts = [[v if isinstance(v, dict) else {key: v} for v in side] for side in values]
                    apart = [distance(a, b) for a, b in zip(*as_dicts, strict=True)]
                    line[key] = max(apart, default=float("inf"))
                    if key == "losses":
                        line["losses_first"], line["losses_last"] = apart[:1], apart[-1:]
            found.append(line)
    return found


def main() -> None:
    action, folder, ranks = sys.argv[1], Path(sys.argv[2]), [int(one) for one in sys.argv[3:]]
    folder.mkdir(parents=True, exist_ok=True)
    if action == "jobs":
        for number in ranks:
            (folder / f"jobs-{number}.json").write_text(json.dumps(jobs(folder, number)))
        return
    found = compare(folder, ranks)
    for line in found:
        print(
            f"{line['run']:<22} {line['ranks']} ranks  losses {line['losses']:.1e}  "
            f"norm {line['grad_norm']:.1e}  metrics {line['metrics']:.1e}  steps {line['train_steps']}"
        )
    (folder / "compare.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
