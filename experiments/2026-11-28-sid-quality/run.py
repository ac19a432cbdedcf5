"""Trains generators of semantic ids and models of ids on two datasets, and prints metrics beside baselines.

    python run.py pack --data DIR --folder beauty-file
        packs what `prepare.sh` made into DIR/sid-beauty-file.tar.xz
    python run.py tune --data DIR --runs RUNS --record FILE [--gpus 0 1 --per-gpu 6 --seconds 480]
        trains every variant of VARIANTS once with the order of the file, and reads its validation metric;
        `--seeds 3` takes three seeds, for a kind whose variants are not compared
    python run.py final --data DIR --runs RUNS --record FILE ...
        trains the variant of each kind that was best on validation with three seeds and both orders of equal
        times, and evaluates it on test, with exact ranks
    python run.py all --data DIR --runs RUNS --record FILE --only VARIANT ...
        does both: a kind is final as soon as its variants that `--only` names are done
    python run.py table --record FILE

Run from the root of the repository, with the archives in DIR. A run is `recsys.train`
and two times `recsys.evaluate`. At the time limit SIGTERM stops and saves all runs; the next call goes on;
runs in FILE are not repeated, so a fresh machine goes on from the record. `--only beauty/parallel` takes runs
whose name contains that text.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

SEEDS = (1, 2, 3)
ORDERS = ("file", "shuffle")
COLD = ("cold2", "cold5")
"""Items of Beauty held out of training, 2 % and 5 %; the test rows are those with such a target."""

FIRST = ("file", "cold2", "shuffle", "cold5")
"""Which runs of the final stage come first."""

METRICS = ("hit_rate@1", "hit_rate@5", "ndcg@5", "hit_rate@10", "ndcg@10", "hit_rate@20", "ndcg@20", "mrr")


@dataclass(frozen=True)
class Variant:
    """The settings of a model that differ between variants; `kind` is a row of the final table."""

    kind: str
    bundle: str
    width: int = 128
    layers: int = 2
    heads: int = 2
    dropout: float = 0.5
    epochs: int = 100
    lr: float = 2e-3
    temperature: float = 0.07
    decoder_layers: int = 1
    rows: int | None = None
    """Rows of a batch; None for `BATCH` of the dataset."""

    warmup: int = 50
    targets: int | None = None
    """Predictions of a row in a step of `tiger`; None for all."""

    mixer: str = "hstu"
    """What reads the history: "hstu", or linear attention with the "delta" rule or "gated"; `tiger` has its own."""

    @property
    def writes_in_order(self) -> bool:
        """Whether a decoder writes the codes one after another."""
        return self.kind in ("in_order", "tiger")

    @property
    def name(self) -> str:
        """Kind and settings, without those that the kind ignores."""
        special = f"dec{self.decoder_layers}" if self.writes_in_order else f"t{self.temperature}"
        sizes = f"w{self.width}-l{self.layers}-d{self.dropout}-e{self.epochs}-lr{self.lr:g}"
        mixer = "" if self.mixer == "hstu" else f"-{self.mixer}"
        targets = "" if self.targets is None else f"-targets{self.targets}"
        return f"{self.kind}/{self.bundle}-{sizes}-{special}{mixer}{targets}"

    def writer(self) -> str:
        """The message of the generator's writer and of its decoding, or the loss of a model of ids."""
        if self.kind == "ids":
            return f"loss {{ softmax {{ temperature: {self.temperature} full {{}} }} }}"
        if not self.writes_in_order:
            ids = " ids { temperature: 0.05 }" if self.kind == "hybrid" else ""
            return f"parallel {{ temperature: {self.temperature} }}{ids}"
        decoder = (
            f"num_layers: {self.decoder_layers} num_heads: 4 ff_dim: {4 * self.width} dropout: {self.dropout}"
        )
        if self.kind == "tiger":
            decoder = self.layers_of_tiger(self.decoder_layers)
        return f"decoder {{ {decoder} }} decoding {{ method: BEAM beam_size: 50 }}"

    def layers_of_tiger(self, count: int) -> str:
        """The settings of an encoder or decoder in the shape of the paper."""
        shape = f"num_layers: {count} num_heads: {self.heads} head_dim: 64 ff_dim: 1024"
        return f"{shape} dropout: {self.dropout}"

    def reader(self) -> str:
        """The messages of the parts that read the history."""
        if self.kind == "tiger":
            drawn = "" if self.targets is None else f" targets_per_row: {self.targets}"
            return f"encoder {{ {self.layers_of_tiger(self.layers)}{drawn} }}"
        shape = f"num_layers: {self.layers} num_heads: {self.heads} qk_dim: {self.width // self.heads}"
        shape = f"{shape} dropout: {self.dropout}"
        linear = f"linear {{ {shape} form: {self.mixer.upper()} }}"
        mixer = f"hstu {{ {shape} {HSTU} }}" if self.mixer == "hstu" else linear
        return READER.format(dropout=self.dropout, mixer=mixer)


def _ordered(**settings: float) -> Variant:
    return Variant("in_order", **{"bundle": "rq3", "lr": 1e-3, **settings})


def _tiger(**settings: float) -> Variant:
    shape = {"bundle": "rq3", "layers": 4, "decoder_layers": 4, "heads": 6}
    training = {"dropout": 0.15, "lr": 1e-3, "rows": 256, "warmup": 500}
    return Variant("tiger", **{**shape, **training, **settings})


def _parallel(**settings: float) -> Variant:
    return Variant("parallel", **{"bundle": "opq16", **settings})


def _hybrid(**settings: float) -> Variant:
    return Variant("hybrid", **{"bundle": "opq16", **settings})


def _ids(**settings: float) -> Variant:
    return Variant("ids", **{"bundle": "none", "width": 64, "temperature": 0.05, **settings})


VARIANTS = {
    "beauty": [
        _ordered(),
        _ordered(bundle="rq4"),
        _ordered(dropout=0.3),
        _ordered(width=256),
        _ordered(decoder_layers=2),
        _ordered(dropout=0.3, width=256, lr=2e-3),
        _ordered(dropout=0.3, width=256, lr=2e-3, bundle="rq4"),
        _ordered(dropout=0.3, width=256, lr=2e-3, mixer="delta"),
        _ordered(width=256, lr=2e-3, mixer="delta"),
        _tiger(),
        _tiger(epochs=40),
        _tiger(epochs=40, targets=4),
        _tiger(dropout=0.3),
        _tiger(dropout=0.3, epochs=200),
        _tiger(dropout=0.3, layers=2, decoder_layers=2),
        _tiger(dropout=0.3, bundle="rq4"),
        _parallel(),
        _parallel(temperature=0.05),
        _parallel(width=256),
        _parallel(dropout=0.3),
        _parallel(epochs=200),
        _parallel(dropout=0.3, width=256),
        _parallel(dropout=0.3, mixer="delta"),
        _parallel(width=256, mixer="delta"),
        _parallel(dropout=0.3, width=256, mixer="delta"),
        _hybrid(),
        _hybrid(width=64),
        _hybrid(width=256),
        _hybrid(temperature=0.05),
        _hybrid(mixer="delta"),
        _hybrid(temperature=0.05, mixer="delta"),
        _hybrid(mixer="gated"),
        _hybrid(width=64, mixer="delta"),
        _ids(),
        _ids(width=128),
        _ids(mixer="delta"),
        _ids(width=128, mixer="delta"),
    ],
    "ml-1m": [
        _ordered(dropout=0.2),
        _ordered(dropout=0.3, width=256),
        _ordered(dropout=0.2, layers=4),
        _parallel(dropout=0.2),
        _parallel(dropout=0.3, width=256),
        _parallel(dropout=0.2, layers=4),
        _hybrid(dropout=0.2),
        _hybrid(dropout=0.3, width=256),
        _hybrid(dropout=0.2, layers=4),
        _hybrid(dropout=0.3, layers=4),
        _hybrid(dropout=0.4, layers=8),
        _ids(dropout=0.2),
        _ids(dropout=0.3, width=128, layers=4),
        _ids(dropout=0.4, width=128, layers=8),
    ],
}
BATCH = {"beauty": 1024, "ml-1m": 256}
HISTORY = {"beauty": 50, "ml-1m": 200}
STEPS_PER_EPOCH = {"beauty": 22, "ml-1m": 24}
ENDINGS = {"beauty": "", "ml-1m": ".parquet"}

READER = """preprocessor {{ uih {{ positional {{ origin: START }} dropout: {dropout} }} }}
    mixer {{ {mixer} }}"""

HSTU = "activation: UVQK gate: UGN bias { num_time_buckets: 70 } mask { contextual_reads_history: false }"

CONFIG = """
data {{
  train {{ parquet {{ paths: "{root}/train{ending}" }} }}
  validation {{ parquet {{ paths: "{root}/validation{ending}" }} }}
  test {{ parquet {{ paths: "{root}/test{ending}" }} }}
  vocabulary_dir: "{root}/vocabulary"
  batch_size: {rows}
  eval_batch_size: {batch}
  num_workers: 1
  max_history_len: {history}
  key_columns: "user_id"
}}
features {{ name: "item_id" sides: [HISTORY, CANDIDATE] id {{ vocabulary {{ unknown_rate: 0 }} }} }}
model {{
  embedding_dim: {width}
  precision: BF16
  embedding {{ placement: REPLICATED }}
  {family} {{
    item_feature: "item_id"
    {bundle}
    seen: REMOVE
    {reader}
    {writer}
    {metrics}
  }}
}}
train {{
  seed: {seed}
  num_epochs: {epochs}
  dense_optimizer {{ adamw {{ lr: {lr} beta2: 0.98 weight_decay: 0.01 }} }}
  schedule {{ warmup_steps: {warmup} cosine {{}} }}
  evaluation {{ every_steps: {every} best_metric: "ndcg@10" }}
  log_every_steps: 100
}}
"""


@dataclass
class Run:
    """A variant on the data of an order with a seed: its folder and, while it runs, its process."""

    dataset: str
    order: str
    variant: Variant
    seed: int
    arguments: argparse.Namespace
    process: subprocess.Popen | None = None
    gpu: int = 0
    began: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.dataset}/{self.order}/{self.variant.name}/{self.seed}"

    @property
    def folder(self) -> Path:
        return self.arguments.runs / self.name.replace("/", "_")

    def config(self) -> str:
        """The config as text."""
        chosen, name = self.variant, self.dataset
        root = self.arguments.data / f"{name}-{self.order}"
        rows = chosen.rows or BATCH[name]
        metrics = [
            f"metrics {{ {kind} {{ k: {k} }} }}" for kind in ("ndcg", "hit_rate") for k in (10, 1, 5, 20)
        ]
        return CONFIG.format(
            **{key: getattr(chosen, key) for key in ("width", "epochs", "lr", "warmup")},
            root=root,
            ending=ENDINGS[name],
            rows=rows,
            batch=BATCH[name],
            history=HISTORY[name],
            family="retriever" if chosen.kind == "ids" else "generator",
            bundle="" if chosen.kind == "ids" else f'bundle: "{root}/{chosen.bundle}"',
            reader=chosen.reader(),
            writer=chosen.writer(),
            metrics="\n    ".join([*metrics, "metrics { mrr {} }"]),
            seed=self.seed,
            every=max(1, chosen.epochs // 20) * STEPS_PER_EPOCH[name] * BATCH[name] // rows,
        )

    def result(self, split: str) -> dict[str, float] | None:
        """The metrics of a split, if it has been evaluated."""
        path = self.folder / f"{split}_metrics.json"
        return json.loads(path.read_text())["metrics"] if path.exists() else None

    def command(self) -> list[str] | None:
        """The command that comes next; None if the run is done."""
        if not (self.folder / "trained").exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.arguments.runs / f"{self.folder.name}.config"
            path.write_text(self.config())
            return ["recsys.train", "--config", str(path), "--run-dir", str(self.folder)]
        for split in ("validation", "test"):
            if self.result(split) is None:
                evaluate = ["recsys.evaluate", "--run-dir", str(self.folder), "--split", split]
                return [*evaluate, *self.settings(split)]
        return None

    def settings(self, split: str) -> list[str]:
        """Flags of an evaluation: exact ranks (`tiger`: its beam of 50), and the weight of ids that validation says is best."""
        if self.variant.kind == "in_order":
            return ["--set", "model.generator.decoding={method: EXACT}"]
        if self.variant.kind != "hybrid":
            return []
        if split == "validation":
            return ["--compare-weights"]
        return ["--set", f"model.generator.ids.weight={best_weight(self.result('validation'))}"]

    def start(self, gpu: int) -> None:
        """Starts the next command; its output goes to a file beside the folder of the run."""
        self.gpu, self.began, command = gpu, time.monotonic(), self.command()
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu), "OMP_NUM_THREADS": "1"}
        with open(f"{self.folder}.log", "a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command], env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    def goes_on(self) -> bool:
        """Notes the end of a command, and returns whether another one follows."""
        if self.process.returncode:
            tail = Path(f"{self.folder}.log").read_text()[-800:]
            print(f"{self.name}: failed with {self.process.returncode}: {tail}", flush=True)
            return False
        (self.folder / "trained").touch()
        following = self.command()
        seconds = time.monotonic() - self.began
        print(f"{self.name}: {seconds:.0f} s before {following[0] if following else 'the end'}", flush=True)
        return following is not None


def best_weight(metrics: dict[str, float]) -> float:
    """The weight of ids with the best NDCG on validation."""
    gains = {name.split("weight_")[1]: gain for name, gain in metrics.items() if "/weight_" in name}
    return float(max(gains, key=gains.get))


def ndcg(validation: dict[str, float]) -> float:
    """NDCG@10 on validation, with the best weight of ids if there are several."""
    values = [gain for name, gain in validation.items() if name.startswith("ndcg@10")]
    return max(values)


def pack(folder: Path) -> None:
    """Packs a folder: parquet files uncompressed, which xz packs better, and of bundles the codes alone."""
    from pyarrow import parquet

    from recsys import files

    target = folder.with_name(f"sid-{folder.name}.tar.xz")
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        copied = Path(temporary) / folder.name
        shutil.copytree(folder, copied, ignore=shutil.ignore_patterns("train_validation*", "latest*"))
        for path in copied.rglob("*.parquet"):
            rows = parquet.read_table(path)
            parquet.write_table(rows, path, compression="none", use_dictionary=False, row_group_size=1024)
        for about in copied.glob("*/bundle.json"):
            shutil.rmtree(about.parent / "transform")
            (about.parent / "quantizer.safetensors").unlink()
            files.write_manifest(about.parent)
        with tarfile.open(target, "w:xz", preset=9) as tar:
            tar.add(copied, folder.name)
    print(target, target.stat().st_size, "bytes")


def unpack(data: Path) -> None:
    """Unpacks the archives that `prepare.sh` made, unless that has been done."""
    for archive in data.glob("sid-*.tar.xz"):
        if not (data / archive.name.removeprefix("sid-").removesuffix(".tar.xz")).exists():
            with tarfile.open(archive) as tar:
                tar.extractall(data, filter="data")


def runs_to_do(arguments: argparse.Namespace, failed: Collection[str] = ()) -> list[Run]:
    """The runs of a stage, those of the final table by the order of equal times and the seed.

    Args:
        failed: names of runs that nobody need wait for.
    """
    tuned = [
        Run(name, "file", variant, seed, arguments)
        for seed in SEEDS[: arguments.seeds]
        for name, tried in VARIANTS.items()
        for variant in tried
    ]
    record = load(arguments.record)
    final = [
        Run(name, order, variant, seed, arguments)
        for order in FIRST
        for seed in SEEDS
        for (name, kind), variant in chosen_variants(record).items()
        if order in orders(name, kind) and (arguments.data / f"{name}-{order}").exists()
    ]
    if arguments.what == "tune":
        return selected(tuned, arguments.only)
    if arguments.what == "final":
        return selected(final, arguments.only)
    tuned = selected(tuned, arguments.only)
    kinds = {(run.dataset, run.variant.kind) for run in tuned}
    waits = {
        (run.dataset, run.variant.kind) for run in tuned if run.name not in record and run.name not in failed
    }
    ready = [run for run in final if (run.dataset, run.variant.kind) in kinds - waits]
    return tuned + [run for run in ready if run.name not in {other.name for other in tuned}]


def selected(runs: list[Run], only: list[str] | None) -> list[Run]:
    return [run for run in runs if not only or any(text in run.name for text in only)]


def orders(dataset: str, kind: str) -> tuple[str, ...]:
    """The orders and cold starts of a dataset; embeddings of ids know nothing of held-out items."""
    return ORDERS + (COLD if dataset == "beauty" and kind in ("in_order", "parallel") else ())


def chosen_variants(record: dict[str, dict]) -> dict[tuple[str, str], Variant]:
    """The variant of each dataset and kind that was best on validation with seed 1 and the file's order."""
    best = {}
    for name, tried in VARIANTS.items():
        for variant in tried:
            made = record.get(f"{name}/file/{variant.name}/1")
            if made is not None:
                value = ndcg(made["validation"])
                key = (name, variant.kind)
                if key not in best or value > best[key][0]:
                    best[key] = (value, variant)
    return {key: variant for key, (_, variant) in best.items()}


def baselines(arguments: argparse.Namespace) -> None:
    """Records popularity and co-occurrence for each dataset and order."""
    record = load(arguments.record)
    for run in [
        Run(name, order, tried[0], 1, arguments) for name, tried in VARIANTS.items() for order in ORDERS
    ]:
        key = f"baselines/{run.dataset}/{run.order}"
        if key not in record:
            arguments.runs.mkdir(parents=True, exist_ok=True)
            path = arguments.runs / "baseline.config"
            path.write_text(run.config())
            command = [sys.executable, "-m", "recsys.baseline", "--config", str(path), "--json"]
            made = subprocess.run(command, check=True, capture_output=True, text=True)
            record[key] = json.loads(made.stdout)
            arguments.record.write_text(json.dumps(record, indent=1))


def train(arguments: argparse.Namespace) -> None:
    """Keeps every GPU busy until all runs are done or the time is over."""
    deadline = time.monotonic() + arguments.seconds
    unpack(arguments.data)
    stopped = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: stopped.append(number))
    active: list[Run] = []
    started: set[str] = set()
    failed: set[str] = set()

    def waiting() -> list[Run]:
        done = started | load(arguments.record).keys()
        return [run for run in runs_to_do(arguments, failed) if run.name not in done and run.command()]

    while (active or waiting()) and time.monotonic() < deadline and not stopped:
        for run in [run for run in active if run.process.poll() is not None]:
            if run.goes_on():
                run.start(run.gpu)
                continue
            active.remove(run)
            store(run)
            if run.name not in load(arguments.record):
                failed.add(run.name)
        for gpu in arguments.gpus:
            while sum(run.gpu == gpu for run in active) < arguments.per_gpu and (runs := waiting()):
                started.add(runs[0].name)
                active.append(runs[0])
                runs[0].start(gpu)
        time.sleep(0.5)
    for run in active:
        run.process.terminate()
    end = time.monotonic() + 40
    for run in active:
        try:
            run.process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            run.process.kill()
    for run in runs_to_do(arguments):
        store(run)
    print(f"not done: {[run.name for run in [*active, *waiting()]]}")


def store(run: Run) -> None:
    """Writes the metrics of a run into the record."""
    made = {split: run.result(split) for split in ("validation", "test")}
    if all(made.values()):
        record = load(run.arguments.record)
        record[run.name] = made
        run.arguments.record.write_text(json.dumps(record, indent=1))


def load(path: Path) -> dict[str, dict]:
    return json.loads(path.read_text()) if path.exists() else {}


def table(record: dict[str, dict]) -> None:
    """Prints validation of all variants, then the test metrics of those chosen, mean of the seeds."""
    print("| data | variant | validation NDCG@10 | weight of ids |\n| --- | --- | --- | --- |")
    for name, tried in VARIANTS.items():
        for variant in tried:
            made = record.get(f"{name}/file/{variant.name}/1")
            if made is not None:
                weight = best_weight(made["validation"]) if variant.kind == "hybrid" else ""
                print(f"| {name} | {variant.name} | {ndcg(made['validation']):.4f} | {weight} |")
    print("\n| data | order | model | seeds |", " | ".join(METRICS), "|")
    print("| --- " * (4 + len(METRICS)) + "|")
    for (name, kind), variant in chosen_variants(record).items():
        for order in orders(name, kind):
            keys = [f"{name}/{order}/{variant.name}/{seed}" for seed in SEEDS]
            made = [record[key]["test"] for key in keys if key in record]
            cells = [cell([metrics[metric] for metrics in made]) for metric in METRICS] if made else []
            print(f"| {name} | {order} | {kind} | {len(made)} |", " | ".join(cells), "|")
    for key, made in record.items():
        if key.startswith("baselines/"):
            print(key, json.dumps(made["baselines"]))


def cell(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["pack", "tune", "final", "all", "baselines", "table"])
    parser.add_argument("--folder", help="for pack")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--runs", type=Path, default=Path("runs/sid-quality"))
    parser.add_argument("--record", type=Path, default=Path("record.json"))
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--gpus", type=int, nargs="+", default=[0], help="their numbers")
    for name, default in (("per-gpu", 6), ("seconds", 480), ("seeds", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    for name in ("data", "runs", "record"):
        setattr(arguments, name, getattr(arguments, name).resolve())
    if arguments.what == "pack":
        pack(arguments.data / arguments.folder)
        return
    if arguments.what == "baselines":
        unpack(arguments.data)
        baselines(arguments)
    elif arguments.what != "table":
        train(arguments)
    table(load(arguments.record))


if __name__ == "__main__":
    main()
