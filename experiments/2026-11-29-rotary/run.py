"""Trains SASRec with and without rotary positions, beside HSTU, with the runner of the record linear-quality.

    python run.py prepare --data DIR --ml-1m ZIP --beauty Beauty.txt --beauty-times TIMES
    python run.py train --data DIR --runs RUNS --only ml-1m-all --gpus 0 1 --per-gpu 9 [--record FILE]
    python run.py validation RUNS

Flags are those of `experiments/2026-11-28-linear-quality/run.py`. Run from the root of the repository. The
settings `small` and `beauty` are short ones for a CPU (`--per-gpu 1`), with sampled negatives; `small` reads
DIR/movielens-small, a copy of `tests/data/movielens`. `validation` prints the best metrics of validation.
"""

import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "2026-11-28-linear-quality" / "run.py"
spec = importlib.util.spec_from_file_location("linear_quality", FILE)
quality = importlib.util.module_from_spec(spec)
sys.modules["linear_quality"] = quality
spec.loader.exec_module(quality)

UIH = "model.retriever.preprocessor.uih"
ARMS = {
    "hstu": (None, ""),
    "sasrec": ("", ""),
    "order": ("rotary { longest_seconds: 0 }", ""),
    "rotary": ("rotary {}", ""),
    # One learned vector for all places instead of one for each, so that only attention knows them.
    "alone": ("rotary {}", f"{UIH}.positional.num_positions=1"),
    "last-event": ("rotary {}", f"{UIH}.query_time=LAST_EVENT"),
}
"""For each arm what it adds to SASRec's message, and one more override."""


@dataclass(frozen=True)
class Setting(quality.Setting):
    """A setting of linear-quality with other arms; `changes` are overrides of all of them."""

    changes: tuple[str, ...] = ()

    def mixers(self) -> dict[str, str]:
        """The text of each arm's mixer; `hstu` is the config's own."""
        sasrec = super().mixers()["sasrec"].removesuffix("}")
        return {arm: "" if added is None else f"{sasrec}{added} }}" for arm, (added, _) in ARMS.items()}

    def overrides(self, mixer: str) -> list[str]:
        """What an arm changes in the config."""
        changes = [*super().overrides(mixer), *self.changes, ARMS[mixer][1]]
        return [change for change in changes if change]


def like(known: quality.Setting, *changes: str) -> Setting:
    return Setting(**vars(known), changes=changes)


CPU = (
    "model.precision=FP32",
    "data.num_workers=0",
    "model.retriever.loss.softmax={temperature: 0.05 uniform {num_negatives: 512}}",
)
SMALL = quality.Setting(
    "movielens-small",
    "configs/movielens_small_retrieval.config",
    "model.retriever.mixer",
    *(2, 1, 50, 0.2),
)
LAST_ONLY = "train.evaluation.every_steps=100000"
SETTINGS = {
    "ml-1m-all": like(quality.SETTINGS["ml-1m-all"]),
    "small": like(SMALL, *CPU, "train.num_epochs=20"),
    "beauty": like(quality.BEAUTY, *CPU, "train.num_epochs=6", "data.batch_size=256", LAST_ONLY),
}


def validation(runs: Path) -> None:
    """Prints mean and standard deviation of each arm's validation metrics at its runs' best evaluations."""
    for setting in SETTINGS:
        for arm in ARMS:
            best = []
            for path in sorted(runs.glob(f"{setting}-{arm}-[0-9]/metrics.jsonl")):
                records = map(json.loads, path.read_text().splitlines())
                made = [record["metrics"] for record in records if record["kind"] == "evaluation"]
                best.append(max(made, key=lambda metrics: metrics["ndcg@10"]))
            if best:
                cells = [f"{name} {quality.cell([m[name] for m in best])}" for name in best[0]]
                print(f"{setting} {arm}, {len(best)} seeds:", ", ".join(cells))


if __name__ == "__main__":
    if sys.argv[1:2] == ["validation"]:
        validation(Path(sys.argv[2]))
    else:
        quality.SETTINGS.clear()
        quality.SETTINGS.update(SETTINGS)
        quality.main()
