"""Trains HSTU, SASRec and linear mixers on three datasets with equal settings, and prints their test metrics.

    python run.py prepare --data DIR --ml-1m ZIP --beauty Beauty.txt --beauty-times TIMES --kuairand FOLDER
        packs each dataset into DIR/NAME.tar.xz, for a machine without the original files
    python run.py train --data DIR --runs RUNS --gpus 0 1 --per-gpu 6 --seconds 480 [--record FILE]
        unpacks what is not unpacked, then trains and evaluates what is not done; at the time limit SIGTERM
        stops and saves all runs, and the next call goes on; prints the table of what is done
    python run.py table --runs RUNS [--record FILE]

Run from the root of the repository. Each run is `recsys.train`, then `recsys.evaluate`, with a ready config
whose mixer is replaced; `--only ml-1m/delta` takes runs whose name contains that text. Runs in FILE are not
repeated, so that a fresh machine goes on from a record. `data.num_workers` is 1 to share the cores.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

SEEDS = (1, 2, 3)
LINEAR = "linear {{ num_layers: {layers} num_heads: {heads} qk_dim: {dim} form: {form} dropout: {dropout} }}"


@dataclass(frozen=True)
class Setting:
    """A ready config with what all of its mixers share; widths are those of the config's own HSTU.

    `rows` replaces the file of training rows, and `change` is one more override.
    """

    dataset: str
    config: str
    mixer_path: str
    layers: int
    heads: int
    dim: int
    dropout: float
    rows: str = ""
    change: str = ""
    metrics: tuple[str, ...] = ("hit_rate@10", "ndcg@10", "hit_rate@50", "hit_rate@200", "mrr")
    reads_history: str = "mask { contextual_reads_history: false }"

    def mixers(self) -> dict[str, str]:
        """The text of each mixer, by name; `hstu` is the config's own."""

        def linear(form: str, layers: int) -> str:
            return LINEAR.format(
                layers=layers, heads=self.heads, dim=self.dim, form=form, dropout=self.dropout
            )

        shared = f"num_heads: {self.heads} dropout: {self.dropout} {self.reads_history}"
        ready = Path(self.config).read_text()
        begin = ready.index("hstu {")
        # A stack of linear layers, then one layer of attention, in the words of the config.
        attention = _block(ready[begin:]).replace(f"num_layers: {self.layers}", "num_layers: 1")
        layers = self.layers - 1
        return {
            "hstu": "",
            "sasrec": f"sasrec {{ num_layers: {self.layers} {shared} }}",
            "gated": linear("GATED", self.layers),
            "delta": linear("DELTA", self.layers),
            "ligr": f"sasrec {{ num_layers: {self.layers} {shared} ligr: true }}",
            "hybrid": f"hybrid {{ mixers {{ {linear('GATED', layers)} }} mixers {{ {attention} }} }}",
        }

    def overrides(self, mixer: str) -> list[str]:
        """What a mixer changes in the config."""
        text = self.mixers()[mixer]
        changes = [self.change, f"{self.mixer_path}={{{text}}}" if text else ""]
        return [change for change in changes if change]


def _block(text: str) -> str:
    """The part of text up to the brace that closes its first one, in one line without comments."""
    text = re.sub(r"#.*", "", text)
    depth = 0
    for index, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if letter == "}" and not depth:
            return " ".join(text[: index + 1].split())
    raise ValueError("a brace is not closed")


ML_1M = Setting("ml-1m", "configs/ml_1m_hstu_large.config", "model.retriever.mixer", 8, 2, 64, 0.4)
BEAUTY = Setting(
    "amazon-beauty",
    "configs/amazon_beauty_hstu.config",
    "model.retriever.mixer",
    *(2, 2, 32, 0.5),
    metrics=("hit_rate@5", "ndcg@5", "hit_rate@10", "ndcg@10", "mrr"),
)
SETTINGS = {
    "ml-1m": ML_1M,
    # Trained on all but the test item and evaluated at the end, as experiments/2026-11-27-ml-1m-protocol was.
    "ml-1m-all": replace(
        ML_1M, rows="train_validation.parquet", change="train.evaluation.every_steps=100000"
    ),
    "amazon-beauty": BEAUTY,
    # Events of the same day in random order, seed 1, in place of the order of the file.
    "amazon-beauty-shuffled": replace(BEAUTY, dataset="amazon-beauty-shuffled"),
    "kuairand": Setting(
        "kuairand",
        "configs/kuairand_ranking.config",
        "model.ranker.mixer",
        *(2, 4, 16, 0.1),
        metrics=tuple(
            f"{task}/{m}" for task in ("is_click", "long_view", "is_like") for m in ("auc", "gauc")
        ),
        reads_history="",
    ),
}


@dataclass
class Run:
    """A mixer on a dataset with a seed: its folder, its commands and, while it runs, its process."""

    setting: str
    mixer: str
    seed: int
    folder: Path
    data: Path
    process: subprocess.Popen | None = None
    gpu: int = 0
    began: float = 0.0
    command: str = "train"
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.setting}/{self.mixer}/{self.seed}"

    def arguments(self) -> list[str]:
        """The command that comes next, as a user gives it."""
        if self.command == "evaluate":
            return ["recsys.evaluate", "--run-dir", str(self.folder)]
        chosen = SETTINGS[self.setting]
        root = self.data / chosen.dataset
        ready = Path(chosen.config).read_text()
        changes = [
            f"train.seed={self.seed}",
            "data.num_workers=1",
            f'data.vocabulary_dir="{root}/vocabulary"',
        ]
        for split in ("train", "validation", "test"):
            path = Path(ready.split(f'{split} {{ parquet {{ paths: "')[1].split('"')[0]).name
            path = chosen.rows if split == "train" and chosen.rows else path
            changes.append(f'data.{split}.parquet.paths=["{root}/{path}"]')
        changes += chosen.overrides(self.mixer)
        sets = [part for change in changes for part in ("--set", change)]
        return ["recsys.train", "--config", chosen.config, "--run-dir", str(self.folder), *sets]

    def start(self, gpu: int) -> None:
        """Starts the next command on a GPU; its output goes to a file beside the run's folder."""
        self.gpu, self.began = gpu, time.monotonic()
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu), "OMP_NUM_THREADS": "1"}
        with open(f"{self.folder}.log", "a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *self.arguments()],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )


def prepare(arguments: argparse.Namespace) -> None:
    """Packs each dataset whose original files are given into DIR/NAME.tar.xz."""
    arguments.data.mkdir(parents=True, exist_ok=True)
    if arguments.ml_1m:
        pack_prepared(arguments.data, "ml-1m", ["movielens", "--input", arguments.ml_1m])
    if arguments.beauty:
        command = ["sequences", "--input", arguments.beauty, "--times", arguments.beauty_times]
        sizes = ["--min-user-events", "5", "--min-item-events", "5", "--max-history", "50"]
        pack_prepared(arguments.data, "amazon-beauty", command + sizes)
        shuffled = ["--ties", "shuffle", "--seed", "1"]
        pack_prepared(arguments.data, "amazon-beauty-shuffled", command + sizes + shuffled)
    if arguments.kuairand:
        pack_prepared(arguments.data, "kuairand", ["kuairand", "--input", arguments.kuairand])
    for path in arguments.data.glob("*.tar.xz"):
        print(path, path.stat().st_size, "bytes")


def prepared(*command: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "recsys.prepare", *map(str, command)], check=True)


def pack_prepared(data: Path, name: str, command: list) -> None:
    """Prepares a dataset and packs it; parquet files are stored uncompressed, which xz packs better."""
    from pyarrow import parquet

    prepared(*command, "--output", data / name, "--overwrite")
    for path in (data / name).rglob("*.parquet"):
        file = parquet.ParquetFile(path)
        groups = [file.read_row_group(group) for group in range(file.num_row_groups)]
        options = {"compression": "none", "use_dictionary": False}
        with parquet.ParquetWriter(path, file.schema_arrow, **options) as writer:
            for group in groups:
                writer.write_table(group, row_group_size=max(1, group.num_rows))
    with tarfile.open(data / f"{name}.tar.xz", "w:xz", preset=9) as tar:
        tar.add(data / name, name)


def unpack(data: Path) -> None:
    """Unpacks what `prepare` packed, unless it is there."""
    for archive in data.glob("*.tar.xz"):
        name = archive.name.removesuffix(".tar.xz")
        if name not in {chosen.dataset for chosen in SETTINGS.values()} or (data / name).exists():
            continue
        with tarfile.open(archive) as tar:
            tar.extractall(data / f"{name}.part", filter="data")
        (data / f"{name}.part" / name).rename(data / name)


def result(run: Run) -> dict | None:
    """The test metrics of a run that is done."""
    path = run.folder / "test_metrics.json"
    if not path.exists():
        return None
    made = json.loads(path.read_text())
    metrics = {name: made["metrics"][name] for name in SETTINGS[run.setting].metrics}
    return {"checkpoint": made["checkpoint"], "metrics": metrics}


def train(arguments: argparse.Namespace) -> None:
    """Keeps every GPU busy until all runs are done or the time is over."""
    deadline = time.monotonic() + arguments.seconds
    unpack(arguments.data)
    stopped = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: stopped.append(number))
    record = load_record(arguments.record)
    waiting = [run for run in all_runs(arguments) if run.name not in record and result(run) is None]
    active: list[Run] = []
    failed: list[Run] = []
    while (waiting or active) and time.monotonic() < deadline and not stopped:
        for run in [run for run in active if run.process.poll() is not None]:
            active.remove(run)
            run.seconds[run.command] = round(time.monotonic() - run.began, 1)
            if run.process.returncode:
                failed.append(run)
                print(
                    f"{run.name}: {run.command} ended with {run.process.returncode}: {tail(run)}", flush=True
                )
            elif run.command == "train":
                run.command = "evaluate"
                run.start(run.gpu)
                active.append(run)
            else:
                print(f"{run.name}: {run.seconds} s, {result(run)['metrics']}", flush=True)
        for gpu in arguments.gpus:
            while waiting and sum(run.gpu == gpu for run in active) < arguments.per_gpu:
                active.append(waiting.pop(0))
                active[-1].start(gpu)
        time.sleep(0.5)
    stop(active)
    print(f"not done: {[run.name for run in [*active, *waiting]]}; failed: {[run.name for run in failed]}")
    table(arguments)


def tail(run: Run) -> str:
    return Path(f"{run.folder}.log").read_text()[-600:]


def stop(active: list[Run], patience: float = 40.0) -> None:
    """Sends SIGTERM, which saves a run's state, and kills what has not ended in time."""
    for run in active:
        run.process.terminate()
    end = time.monotonic() + patience
    for run in active:
        try:
            run.process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            run.process.kill()
            print(f"{run.name}: did not save in {patience:.0f} s; it goes on from its last evaluation")


def all_runs(arguments: argparse.Namespace) -> list[Run]:
    """All runs, the first seed of everything first."""
    runs = [
        Run(setting, mixer, seed, arguments.runs / f"{setting}-{mixer}-{seed}", arguments.data)
        for seed in SEEDS
        for setting, chosen in SETTINGS.items()
        for mixer in chosen.mixers()
    ]
    return [run for run in runs if not arguments.only or any(text in run.name for text in arguments.only)]


def load_record(path: Path | None) -> dict[str, dict]:
    return json.loads(path.read_text()) if path is not None and path.exists() else {}


def table(arguments: argparse.Namespace) -> None:
    """Prints mean and standard deviation of the seeds that are done, and updates the record."""
    record = load_record(arguments.record)
    for run in all_runs(arguments):
        made = result(run)
        if made is not None:
            record[run.name] = {**record.get(run.name, {}), **made}
    if arguments.record:
        arguments.record.write_text(json.dumps(record, indent=1))
    for setting, chosen in SETTINGS.items():
        print(f"\n| {setting} | seeds |", " | ".join(chosen.metrics), "|")
        print("| --- " * (len(chosen.metrics) + 2) + "|")
        for mixer in chosen.mixers():
            done = [record[name] for seed in SEEDS if (name := f"{setting}/{mixer}/{seed}") in record]
            if done:
                cells = [cell([made["metrics"][metric] for made in done]) for metric in chosen.metrics]
                print(f"| {mixer} | {len(done)} |", " | ".join(cells), "|")


def cell(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["prepare", "train", "table"])
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--runs", type=Path, default=Path("runs/linear-quality"))
    parser.add_argument("--record", type=Path)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--gpus", type=int, nargs="+", default=[0], help="their numbers")
    for name, default in (("per-gpu", 6), ("seconds", 480)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("ml-1m", "beauty", "beauty-times", "kuairand"):
        parser.add_argument(f"--{name}", type=Path)
    arguments = parser.parse_args()
    for name in ("data", "runs"):
        setattr(arguments, name, getattr(arguments, name).resolve())
    {"prepare": prepare, "train": train, "table": table}[arguments.what](arguments)


if __name__ == "__main__":
    main()
