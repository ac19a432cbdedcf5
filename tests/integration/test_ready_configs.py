"""Every file of `configs/`: trained for some steps on bundled rows, exported, predicted, equal to evaluation.

The model, the features and the training are those of the file, but for the depth of some; the rows and their
number are not. Nothing is compiled here but with `--slow`.
"""

import csv
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from google.protobuf.message import Message

from recsys import config
from recsys import export as export_command
from recsys import predict as predict_command
from recsys import protos as pb
from recsys import train as train_command
from recsys.inference.predictor import Predictor
from recsys.prepare import __main__ as prepare
from recsys.scoring.signature import ScoringGraph
from tests.integration import parity
from tests.integration.runs import records
from tests.models import test_generator
from tests.modules.pipelines import pipeline_of
from tests.scoring import test_cached_signature, test_signature
from tests.tools.bundles import movielens_codes

CONFIGS = sorted(path.name for path in Path("configs").glob("*.config"))
ROWS = {"train": 24, "validation": 10, "test": 24}
STEPS = 2
SHORT = (
    "data.num_workers=0",
    "data.batch_size=8",
    "data.eval_batch_size=16",
    "train.num_epochs=",
    f"train.num_steps={STEPS}",
    "train.schedule={constant {}}",
    "train.evaluation={}",
    "train.log_every_steps=1",
)


ONE_LAYER = ("model.retriever.mixer.hstu.num_layers=1",)
SHALLOW = {
    "amazon_beauty_hstu.config": ONE_LAYER,
    "amazon_beauty_hybrid.config": ("model.generator.mixer.linear.num_layers=1",),
    "amazon_beauty_linear.config": ("model.retriever.mixer.linear.num_layers=1",),
    "amazon_beauty_sasrec.config": ("model.retriever.mixer.sasrec.num_layers=1",),
    "ml_1m_hstu.config": ONE_LAYER,
    "ml_1m_hstu_large.config": ONE_LAYER,
    "ml_1m_hybrid.config": ("model.generator.mixer.hstu.num_layers=1",),
    "kuairand_ranking.config": ("model.ranker.mixer.hstu.num_layers=1",),
    "ml_1m_ranking.config": tuple(
        f"model.ranker.mixer.hstu.layer_groups[{group}].num_layers=1" for group in (0, 1)
    ),
}
"""Overrides of stacks of equal layers, of which one does what all do; the other configs keep their stacks,
among them one of each kind."""

COMPILED = ("quickstart.config", "movielens_small_two_tower.config")
"""Configs that are trained for longer, exported and compared with evaluation by `test_export_predict.py`."""


def movielens_ranking(folder: Path) -> Path:
    """The bundled ratings, with users (whom the small releases do not have), made ready for ranking."""
    release, data = folder / "release", folder / "data"
    release.mkdir()
    lines = {}
    for name in ("ratings", "movies"):
        text = Path(f"tests/data/movielens/original/{name}.csv").read_text(encoding="utf-8")
        lines[name] = list(csv.reader(text.splitlines()))[1:]
    users = sorted({line[0] for line in lines["ratings"]})
    lines["users"] = [[user, "FM"[n % 2], f"{18 + n}", f"{n % 21}", "0"] for n, user in enumerate(users)]
    for name, actual in lines.items():
        text = "\n".join("::".join(line) for line in actual) + "\n"
        (release / f"{name}.dat").write_text(text, encoding="latin-1", errors="replace")
    flags = ["--task", "ranking", "--min-count", "1", "--input", str(release), "--output", str(data)]
    assert prepare.main(["movielens", *flags]) == 0
    return data


def kuairand(folder: Path) -> Path:
    """The bundled part of the log made ready, with all that the preparation makes of it today."""
    data = folder / "data"
    flags = ["--min-count", "1", "--input", "tests/data/kuairand/original", "--output", str(data)]
    assert prepare.main(["kuairand", *flags]) == 0
    return data


def bundled(name: str) -> Callable[[Path], Path]:
    return lambda _: Path("tests/data") / name


DATA = {
    "amazon_beauty_hstu.config": bundled("movielens"),
    "amazon_beauty_hybrid.config": bundled("movielens"),
    "amazon_beauty_linear.config": bundled("movielens"),
    "amazon_beauty_sasrec.config": bundled("movielens"),
    "kuairand_ranking.config": kuairand,
    "kuairand_ultra_hstu.config": kuairand,
    "ml_1m_hstu.config": bundled("movielens"),
    "ml_1m_hstu_large.config": bundled("movielens"),
    "ml_1m_hybrid.config": bundled("movielens"),
    "ml_1m_ranking.config": movielens_ranking,
    "ml_1m_sasrec.config": bundled("movielens"),
    "movielens_small_generator.config": bundled("movielens"),
    "movielens_small_parallel.config": bundled("movielens"),
    "movielens_small_retrieval.config": bundled("movielens"),
    "movielens_small_two_tower.config": bundled("movielens"),
    "quickstart.config": bundled("kuairand"),
}
"""By config: from an empty folder to one with its splits and vocabularies."""


class Trained(NamedTuple):
    """A run of a config, what it was made with, and its test rows."""

    run: Path
    pipeline: pb.Pipeline
    rows: pa.Table


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] * (name in COMPILED)) for name in CONFIGS],
)
def trained(request, tmp_path_factory) -> Trained:
    folder = tmp_path_factory.mktemp("ready")
    data = DATA[request.param](folder)
    overrides = [*SHORT, *SHALLOW.get(request.param, ()), f'data.vocabulary_dir="{data}/vocabulary"']
    for split, count in ROWS.items():
        path = folder / f"{split}.parquet"
        pq.write_table(pq.read_table(data / f"{split}.parquet").slice(0, count), path)
        overrides.append(f'data.{split}={{parquet {{paths: "{path}"}}}}')
    path = Path("configs") / request.param
    if config.read(path).pipeline.model.HasField("generator"):
        overrides.append(f'model.generator.bundle="{movielens_codes(folder / "bundle")}"')
    flags = ["--config", str(path), "--run-dir", str(folder / "run")]
    for override in overrides:
        flags += ["--set", override]
    assert train_command.main(flags) == 0
    pipeline = config.resolve(config.read(path, overrides).pipeline).pipeline
    rows = pq.read_table(folder / "test.parquet")
    assert len(set(pc.list_value_length(rows["uih_item_id"]).to_pylist())) > 3, "histories of several lengths"
    return Trained(folder / "run", pipeline, rows)


def test_a_config_learns_and_predicts_what_evaluation_says(trained, request):
    losses = [record["loss"] for record in records(trained.run).values()]
    assert len(losses) == STEPS and all(0 < loss < 100 for loss in losses)
    model = parity.trained_model(trained.run, trained.pipeline)
    batches = parity.evaluated_batches(trained.pipeline)
    if request.config.getoption("--slow"):
        package = parity.captured_package(model, batches)
    else:
        package = parity.package_of(model, batches, ScoringGraph(model).eval())
    parity.assert_predicted(model, batches, trained.rows, Predictor(package).table(trained.rows))


@pytest.mark.slow
def test_the_package_of_a_config_predicts_what_evaluation_says(trained, tmp_path, monkeypatch):
    def call(command, *flags: object) -> None:
        monkeypatch.setattr(sys, "argv", ["recsys", *map(str, flags)])
        assert command.main() == 0

    call(export_command, "--run-dir", trained.run, "--output", tmp_path / "package")
    call(predict_command, "--package", tmp_path / "package", "--output", tmp_path / "predictions")
    model = parity.trained_model(trained.run, trained.pipeline)
    answers = pq.read_table(tmp_path / "predictions")
    parity.assert_predicted(model, parity.evaluated_batches(trained.pipeline), trained.rows, answers)


def resolved(name: str) -> pb.Pipeline:
    """The config of this name with all defaults."""
    return config.resolve(config.read(f"configs/{name}").pipeline, read_files=False).pipeline


def parts_of(pipeline: pb.Pipeline) -> set[str]:
    """The fields that a model and its features set, with the values of switches and choices, less what a
    scoring graph does not contain. A mixer is the same in all models, alone and as one of several."""
    parts = {f"feature{part}" for feature in pipeline.features for part in fields(feature)}
    for part in fields(pipeline.model):
        within = part.partition(".mixer")[2]
        part = f"mixer{re.sub(r'^[.](hybrid[.]mixers|mixture[.]stacks)', '', within)}" if within else part
        if not re.search(r"[.](loss|metrics|tasks|init_std|stochastic_depth|repeated_targets)\b", part):
            parts.add(part)
    return parts


def fields(message: Message, prefix: str = "") -> Iterator[str]:
    """The paths of all fields that are set, and the values of those that are switches or choices."""
    for field, value in message.ListFields():
        path = f"{prefix}.{field.name}"
        for entry in value if field.is_repeated else [value]:
            if field.type == field.TYPE_MESSAGE:
                yield path
                yield from fields(entry, path)
            else:
                yield f"{path}={entry}" if field.type in (field.TYPE_BOOL, field.TYPE_ENUM) else path


@pytest.fixture(scope="module")
def captured_parts(tmp_path_factory) -> set[str]:
    """Parts of the graphs that are captured without `--slow`: of small models, as a capture takes seconds,
    and of configs that become packages."""
    folders = {kind: tmp_path_factory.mktemp("generator") for kind in test_generator.CAPTURED}
    captured = [
        *(resolved(name) for name in COMPILED),
        *(pipeline_of(*test_signature.MODELS[name]) for name in test_signature.CAPTURED),
        *(pipeline_of(*test_cached_signature.MODELS[name]) for name in test_cached_signature.CAPTURED),
        *(test_generator.captured_pipeline(folder, kind) for kind, folder in folders.items()),
    ]
    return set().union(*map(parts_of, captured))


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in COMPILED])
def test_each_part_of_a_graph_is_in_one_that_is_captured(name, captured_parts):
    assert not parts_of(resolved(name)) - captured_parts


def test_every_config_has_rows_to_be_tried_on():
    assert set(DATA) == set(CONFIGS)
