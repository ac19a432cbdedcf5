"""The README's way to add a loss, metric, head, mixer or preprocessor, walked in a copy of the package.

The message, one line in its oneof, one module and one import line: nothing else is edited, and a config that
names all of them trains.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from scripts.compile_protos import compile_protos
from tests.integration.runs import one_thread, records

ROOT = Path(__file__).resolve().parent.parent


class Added(NamedTuple):
    """What is written for one component.

    Attributes:
        kind: proto file and oneof; the folder is its plural.
        line: in the oneof.
        message: in the proto file.
        name: of the module. code: of the module, behind its imports.
    """

    kind: str
    line: str
    message: str
    name: str
    code: str


IMPORTS = """
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recsys import features
from recsys import protos as pb
from recsys.data.batch import LayoutRule
from recsys.modules.flops import linear_flops
from recsys.modules.losses.base import RankingLoss, widen
from recsys.modules.metrics.base import PredictionMean
from recsys.modules.preprocessors.preprocessed import Preprocessed, inputs_of
from recsys.modules.preprocessors.views import views
from recsys.modules.sequence import JaggedSequence
from recsys.ops import gather_rows
from recsys.config.registry import register
"""

COMPONENTS = [
    Added(
        "loss",
        'HuberLoss huber = 100 [(labels) = "regression"]; HuberLoss unsaid = 101;',
        "message HuberLoss { double delta = 1 [default = 3]; }",
        "huber",
        """
@register(pb.HuberLoss)
class HuberLoss(RankingLoss):
    kind = "regression"

    def __init__(self, config):
        super().__init__()
        self.delta = config.delta

    def forward(self, logits, labels, rows=None):
        return F.huber_loss(widen(logits), widen(labels), reduction="none", delta=self.delta)

    def predict(self, logits):
        return widen(logits)
""",
    ),
    Added(
        "metric",
        'Within within = 100 [(labels) = "regression"];',
        "message Within { double range = 1 [default = 5]; }",
        "within",
        """
@register(pb.Within)
class Within(PredictionMean):
    name = "within"
    higher_is_better = True

    def __init__(self, config):
        super().__init__()
        self.range = config.range

    def values(self, predictions, labels):
        return ((predictions - labels).abs() <= self.range).double()
""",
    ),
    Added(
        "head",
        "LinearHead linear = 100;",
        "message LinearHead {}",
        "linear",
        """
@register(pb.LinearHead)
class LinearHead(nn.Module):
    def __init__(self, config, *, embedding_dim, num_outputs):
        super().__init__()
        self.project = nn.Linear(embedding_dim, sum(num_outputs))

    def forward(self, user, item):
        return self.project(user * item)
""",
    ),
    Added(
        "mixer",
        "TokenMixer token = 100;",
        "message TokenMixer { int32 num_layers = 1 [default = 1]; }",
        "token",
        """
@register(pb.TokenMixer)
class TokenMixer(nn.Module):
    def __init__(self, config, *, embedding_dim):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(embedding_dim, embedding_dim) for _ in range(config.num_layers))

    def forward(self, sequence):
        values = sequence.values
        for layer in self.layers:
            values = values + F.silu(layer(values))
        return sequence.with_values(values)

    def flops(self, layout):
        return linear_flops(self, layout.total_len)
""",
    ),
    Added(
        "preprocessor",
        'BarePreprocessor bare = 100 [(models) = "ranker"];',
        "message BarePreprocessor {}",
        "bare",
        """
@register(pb.BarePreprocessor)
class BarePreprocessor(nn.Module):
    def __init__(self, config, *, pipeline):
        super().__init__()
        self.sides = [features.columns(pipeline, side) for side in (pb.HISTORY, pb.CANDIDATE)]
        self.project = nn.Linear(sum(column.width for column in self.sides[0]), pipeline.model.embedding_dim)

    @staticmethod
    def layout_rule(config, pipeline):
        return LayoutRule(num_contextual=0, targets=True)

    def forward(self, embeddings, batch):
        inputs = inputs_of(embeddings, batch)
        history, candidates = (
            self.project(torch.cat([inputs[column.name] for column in side], dim=1)) for side in self.sides
        )
        (view,) = views(batch, 1)
        values = gather_rows(torch.cat([history, candidates]), view.index)
        return Preprocessed(
            JaggedSequence(values, batch.sequences, view.times[:, 0], view.times[:, 1]), candidates
        )

    def flops(self, batch):
        return linear_flops(self, batch.uih_timestamps.shape[0] + batch.candidate_timestamps.shape[0])
""",
    ),
]
"""Without docstrings and types: it is the way that is tested."""


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The package with everything of COMPONENTS added."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(
        ROOT / "recsys", folder / "recsys", ignore=shutil.ignore_patterns("__pycache__", "protos")
    )
    shutil.copytree(ROOT / "protos", folder / "protos")
    for name in ("tests", "configs"):
        (folder / name).symlink_to(ROOT / name)
    for added in COMPONENTS:
        proto = folder / "protos" / f"{added.kind}.proto"
        text = proto.read_text(encoding="utf-8")
        oneof = f"oneof {added.kind} {{\n"
        assert text.count(oneof) == 1
        proto.write_text(text.replace(oneof, f"{oneof}    {added.line}\n") + added.message, encoding="utf-8")
        module = folder / "recsys" / "modules" / f"{added.kind}{'es' if added.kind == 'loss' else 's'}"
        (module / f"{added.name}.py").write_text(IMPORTS + added.code, encoding="utf-8")
        cls = re.search(r"class (\w+)", added.code)[1]
        with (module / "__init__.py").open("a", encoding="utf-8") as init:
            init.write(f"from recsys.modules.{module.name}.{added.name} import {cls}\n")
    compile_protos(folder)
    return folder


def command(copy: Path, name: str, *flags: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", f"recsys.{name}", *flags],
        cwd=copy,
        env=one_thread() | {"PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_config_that_names_new_components_trains(copy):
    task = "model.ranker.tasks[1]"
    chosen = [
        "model.ranker.preprocessor={bare {}}",
        "model.ranker.mixer={token {num_layers: 2}}",
        "model.ranker.head={linear {}}",
        f"{task}.loss={{huber {{delta: 2}}}}",
        f"{task}.metrics=[{{within {{range: 20}}}}, {{mae {{}}}}]",
        "train.num_steps=2",
        "train.schedule.warmup_steps=0",
        "train.evaluation.best_metric=watch_time/within",
    ]
    flags = ["--config", "tests/integration/tiny.config", "--run-dir", "run"]
    flags += [part for override in chosen for part in ("--set", override)]
    assert command(copy, "train", *flags, "--validate").endswith("ok\n")
    assert "loss of the first step" in command(copy, "train", *flags, "--dry-run")
    command(copy, "train", *flags)
    metrics = records(copy / "run", "evaluation")[2]["metrics"]
    assert 0 <= metrics["watch_time/within"] <= 1 and metrics["loss/watch_time"] > 0


def test_a_retriever_takes_a_new_mixer(copy):
    flags = ["--config", "configs/movielens_small_retrieval.config", "--set", "data.num_workers=0"]
    flags += ["--set", "model.retriever.mixer={token {}}", "--dry-run"]
    assert "loss of the first step" in command(copy, "train", *flags)


def test_a_new_component_in_a_wrong_place_is_a_finding(copy):
    flags = ["--config", "tests/integration/tiny.config", "--validate"]
    wrong = ["model.ranker.tasks[0].metrics=[{within {}}]", "model.ranker.tasks[1].loss={unsaid {}}"]
    said = command(copy, "train", *flags, "--set", wrong[0], "--set", wrong[1], code=2)
    assert "model.ranker.tasks[0].metrics[0].within: does not fit a binary task; use one of auc" in said
    assert "model.ranker.tasks[1].loss.unsaid: protos/loss.proto does not say which labels" in said
    flags[1] = "configs/movielens_small_retrieval.config"
    said = command(copy, "train", *flags, "--set", "model.retriever.preprocessor={bare {}}", code=2)
    assert "model.retriever.preprocessor.bare: does not fit a retriever; use uih" in said
    said = command(copy, "train", *flags, "--set", "model.retriever.loss={huber {}}", code=2)
    assert "model.retriever.loss.huber: is a loss of regression; use one of softmax" in said
