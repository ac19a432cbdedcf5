"""The documented way to add a part of a model or a family of models, walked in a copy of the package.

The message, one line in its oneof, one module and one import line: nothing else is edited. A config that
names all of the parts trains, and a model of the new family trains, resumes, evaluates, exports and predicts.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scripts.compile_protos import compile_protos
from tests.integration.runs import one_thread, records

ROOT = Path(__file__).resolve().parent.parent
TINY, RETRIEVAL = "tests/integration/tiny.config", "configs/movielens_small_retrieval.config"


class Added(NamedTuple):
    """The code that a component adds.

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
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recsys import protos as pb
from recsys.config import features
from recsys.config.checks import Finding
from recsys.config.checks.values import COUNT, limit
from recsys.config.declarations import Choice, MixerDeclaration, ModelDeclaration
from recsys.config.registry import declare, register
from recsys.data.batch import LayoutRule
from recsys.modules.flops import linear_flops
from recsys.modules.losses.base import RankingLoss, widen
from recsys.modules.metrics.base import PredictionMean
from recsys.modules.mixers.base import AttentionUse, Mixer
from recsys.modules.preprocessors.preprocessed import Preprocessed, inputs_of
from recsys.modules.preprocessors.views import views
from recsys.modules.sequence import JaggedSequence
from recsys.ops import AttentionMask, gather_rows, softmax_attention
from recsys.ops.attention_args import AttentionFacts
from recsys.ops.softmax_attention import OP
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
        "message TokenMixer { int32 num_layers = 1 [default = 1]; int32 num_heads = 2; }",
        "token",
        """
limit(pb.TokenMixer, {"num_layers": COUNT, "num_heads": COUNT})


@declare(pb.TokenMixer)
class TokenDeclaration(MixerDeclaration):
    def choices(self):
        heads = self.model.embedding_dim // 8
        yield Choice(self.config, self.path, "num_heads", heads, "model.embedding_dim / 8")

    def findings(self):
        if self.config.num_heads and self.model.embedding_dim % self.config.num_heads:
            yield Finding(f"{self.path}.num_heads", "does not divide model.embedding_dim")


@register(pb.TokenMixer)
class TokenMixer(Mixer):
    def __init__(self, config, *, embedding_dim):
        super().__init__()
        self.num_heads = config.num_heads
        self.layers = nn.ModuleList(nn.Linear(embedding_dim, embedding_dim) for _ in range(config.num_layers))

    @classmethod
    def kernels(cls, config, path, model, device):
        width = model.embedding_dim // config.num_heads
        facts = AttentionFacts(
            device=device, dtype=torch.float32, num_heads=config.num_heads, qk_dim=width, v_dim=width,
            mask=AttentionMask(), needs_grad=True, deterministic=False,
        )
        yield AttentionUse(OP, path, "auto", facts)

    def forward(self, sequence):
        values = sequence.values
        for layer in self.layers:
            q = layer(values).unflatten(1, (self.num_heads, -1))
            values = values + softmax_attention(q, q, q, sequence.layout, AttentionMask()).flatten(1)
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

FAMILY = Added(
    "model",
    "DotModel dot = 100;",
    "message DotModel { repeated Task tasks = 1; int32 width = 4; }",
    "dot",
    """
from recsys.models.base import Model
from recsys.models.tasks import TaskLosses, TaskPredictions, task_metrics, task_rows

limit(pb.DotModel, {"width": COUNT}, required=("tasks",))


@declare(pb.DotModel)
class DotDeclaration(ModelDeclaration):
    has_targets = False

    def choices(self):
        width = self.pipeline.model.embedding_dim
        yield Choice(self.config, self.path, "width", width, "model.embedding_dim")

    def findings(self):
        if any(task.weight < 1 for task in self.tasks):
            yield Finding(f"{self.path}.tasks", "a dot weighs its tasks with at least 1")

    def warnings(self):
        if self.pipeline.data.max_candidates:
            yield Finding("data.max_candidates", "a dot can take any number")


@register(pb.DotModel)
class DotModel(Model):
    def __init__(self, config, *, pipeline):
        super().__init__(pipeline)
        self.columns = features.item_columns(pipeline)
        self.names = [column.feature.name for column in self.columns if column.table]
        total = sum(column.width for column in self.columns if column.table)
        self.project = nn.Linear(total, config.width)
        self.objective = TaskLosses(config.tasks)
        self.tasks = list(config.tasks)
        self.scale = nn.Linear(1, len(self.tasks))
        self.predict = TaskPredictions([task.name for task in config.tasks], self.objective.losses)

    @classmethod
    def layout_rule(cls, config, pipeline):
        return LayoutRule(num_contextual=0, targets=False)

    def forward(self, batch):
        embeddings = self.embed(batch)
        events, candidates = (
            self.project(torch.cat([embeddings[side + name] for name in self.names], dim=1))
            for side in ("uih_", "candidate_")
        )
        rows = torch.arange(batch.uih_lengths.shape[0], device=events.device)
        row_of_event = torch.repeat_interleave(rows, batch.uih_lengths, output_size=events.shape[0])
        sums = events.new_zeros(rows.shape[0], events.shape[1]).index_add(0, row_of_event, events)
        means = sums / batch.uih_lengths.clamp(min=1)[:, None]
        of_candidates = torch.repeat_interleave(
            means, batch.num_candidates, dim=0, output_size=candidates.shape[0]
        )
        dots = (of_candidates * candidates).sum(1, keepdim=True)
        return self.predict(self.scale(dots))

    def score(self, batch):
        return self(batch).scores()

    def flops(self, batch):
        return linear_flops(self.project, batch.uih_timestamps.shape[0] + batch.candidate_timestamps.shape[0])

    def metrics(self):
        return task_metrics(self.tasks)

    def metric_rows(self, outputs, batch):
        return task_rows(outputs, batch)
""",
)


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The package with everything of COMPONENTS and FAMILY added."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(
        ROOT / "recsys", folder / "recsys", ignore=shutil.ignore_patterns("__pycache__", "protos")
    )
    shutil.copytree(ROOT / "protos", folder / "protos")
    for name in ("tests", "configs"):
        (folder / name).symlink_to(ROOT / name)
    for added in [*COMPONENTS, FAMILY]:
        proto = folder / "protos" / f"{added.kind}.proto"
        text = proto.read_text(encoding="utf-8")
        oneof = f"oneof {added.kind} {{\n"
        assert text.count(oneof) == 1
        proto.write_text(text.replace(oneof, f"{oneof}    {added.line}\n") + added.message, encoding="utf-8")
        plural = f"{added.kind}{'es' if added.kind == 'loss' else 's'}"
        package = [plural] if added is FAMILY else ["modules", plural]
        module = folder.joinpath("recsys", *package)
        (module / f"{added.name}.py").write_text(IMPORTS + added.code, encoding="utf-8")
        cls = re.findall(r"class (\w+)", added.code)[-1]
        with (module / "__init__.py").open("a", encoding="utf-8") as init:
            init.write(f"from recsys.{'.'.join(package)}.{added.name} import {cls}  # noqa: E402\n")
    compile_protos(folder)
    return folder


COMMANDS = """
import contextlib, importlib, io, json, sys
said = []
for name, *flags in json.loads(sys.argv[1]):
    sys.argv = [f"recsys.{name}", *flags]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        code = importlib.import_module(f"recsys.{name}").main()
    said.append([code, out.getvalue()])
print("\\n" + json.dumps(said))
"""


class Said(NamedTuple):
    """The exit code of a command and what it printed."""

    code: int
    text: str


def commands(copy: Path, *lines: list[str]) -> list[Said]:
    """Runs commands, each a name with its flags, one after the other in one process of the copy."""
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(lines)],
        cwd=copy,
        env=one_thread() | {"PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [Said(*entry) for entry in json.loads(done.stdout.splitlines()[-1])]


def config_flags(file: str, *overrides: str) -> list[str]:
    return ["--config", file, *(part for override in overrides for part in ("--set", override))]


def test_a_config_that_names_new_components_trains(copy):
    task = "model.ranker.tasks[1]"
    flags = config_flags(
        TINY,
        "model.ranker.preprocessor={bare {}}",
        "model.ranker.mixer={token {num_layers: 2}}",
        "model.ranker.head={linear {}}",
        f"{task}.loss={{huber {{delta: 2}}}}",
        f"{task}.metrics=[{{within {{range: 20}}}}, {{mae {{}}}}]",
        "train.num_steps=2",
        "train.schedule.warmup_steps=0",
        "train.evaluation.best_metric=watch_time/within",
    )
    retrieval = config_flags(RETRIEVAL, "data.num_workers=0", "model.retriever.mixer={token {num_heads: 2}}")
    said = commands(
        copy,
        ["train", *flags, "--validate"],
        ["train", *flags, "--print-config"],
        ["train", *flags, "--run-dir", "run", "--dry-run"],
        ["train", *flags, "--run-dir", "run"],
        ["train", *retrieval, "--run-dir", "retrieval", "--dry-run"],
    )
    assert [one.code for one in said] == [0] * 5, said
    assert said[0].text.endswith("ok\n")
    assert "num_heads: 2  # model.embedding_dim / 8" in said[1].text
    assert "loss of the first step" in said[2].text and "loss of the first step" in said[4].text
    assert (
        "kernel of softmax_attention: reference (cpu, float32, model.ranker.mixer.token.backend"
        in said[2].text
    )
    assert "TokenMixer says no rules of its layers" in said[2].text
    metrics = records(copy / "run", "evaluation")[2]["metrics"]
    assert 0 <= metrics["watch_time/within"] <= 1 and metrics["loss/watch_time"] > 0


def test_a_new_component_in_a_wrong_place_is_a_finding(copy):
    wrong = {
        "model.ranker.tasks[0].metrics=[{within {}}]": (
            "model.ranker.tasks[0].metrics[0].within: does not fit a binary task; use one of auc"
        ),
        "model.ranker.tasks[1].loss={unsaid {}}": (
            "model.ranker.tasks[1].loss.unsaid: protos/loss.proto does not say which labels"
        ),
        "model.ranker.mixer={token {num_heads: 3}}": (
            "model.ranker.mixer.token.num_heads: does not divide model.embedding_dim"
        ),
        "model.ranker.mixer={token {num_layers: 0}}": (
            "model.ranker.mixer.token.num_layers: 0 is given; it must be 1 or more"
        ),
        "export.cached_scoring=true model.ranker.mixer={token {}}": (
            "export.cached_scoring: mixer.token keeps no cache; drop it, or use hstu or mixture"
        ),
        "model.dot={tasks {name: 'is_click' weight: 0.5 loss {binary_cross_entropy {}}}}": (
            "model.dot.tasks: a dot weighs its tasks with at least 1"
        ),
    }
    of_retrieval = {
        "model.retriever.preprocessor={bare {}}": (
            "model.retriever.preprocessor.bare: does not fit a retriever; use uih"
        ),
        "model.retriever.loss={huber {}}": (
            "model.retriever.loss.huber: is a loss of regression; use one of softmax"
        ),
    }
    files = [TINY] * len(wrong) + [RETRIEVAL] * len(of_retrieval)
    expected = wrong | of_retrieval
    overrides = [re.sub(r"true (model.*)", r"true|\1", given).split("|") for given in expected]
    lines = [
        ["train", *config_flags(file, *given), "--validate"]
        for file, given in zip(files, overrides, strict=True)
    ]
    for one, text in zip(commands(copy, *lines), expected.values(), strict=True):
        assert one.code == 2 and text in one.text, one.text


def test_a_new_family_goes_all_the_way(copy):
    task = "tasks {name: 'is_click' loss {binary_cross_entropy {}} metrics {auc {}} metrics {gauc {}}}"
    changes = (f"model.dot={{{task}}}", "train.schedule.warmup_steps=0")
    flags = config_flags(TINY, *changes)
    run = ["--run-dir", "dot"]
    said = commands(
        copy,
        ["train", *flags, *run, "--dry-run"],
        ["train", *flags, *run, "--set", "train.num_steps=4"],
        ["train", *flags, *run, "--set", "train.num_steps=6"],
        ["evaluate", *run, "--split", "validation"],
        ["export", *run],
        ["predict", *run, "--input", "tests/data/kuairand/validation.parquet"],
        ["evaluate", *flags, *run, "--set", "model.dot.width=8", "--split", "validation"],
    )
    assert [one.code for one in said] == [0] * 6 + [2], said
    assert "data.max_candidates: a dot can take any number" in said[0].text
    assert re.search(r"going on from .*step-0*4\b", said[2].text)
    assert "is_click/auc" in said[3].text
    assert "model.dot.tasks.metrics" in said[6].text and "model.dot.width: 16" in said[6].text
    description = json.loads((copy / "dot" / "export" / "package.json").read_text(encoding="utf-8"))
    assert (description["kind"], description["outputs"]) == ("dot", ["is_click"])
    parts = sorted((copy / "dot" / "predictions").glob("part-*.parquet"))
    table = pa.concat_tables([pq.read_table(part) for part in parts])
    assert table.column_names == ["user_id", "request_id", "candidate_item_id", "is_click"]
    rows = pq.read_table(ROOT / "tests/data/kuairand/validation.parquet")
    assert table["candidate_item_id"].to_pylist() == rows["candidate_item_id"].to_pylist()
    scores = table["is_click"].to_pylist()
    assert all(0 < score < 1 for row in scores for score in row)
    # The package's scores rank the rows as the command evaluated them.
    labels = [label for row in rows["candidate_is_click"].to_pylist() for label in row]
    auc = float(re.search(r"is_click/auc +([0-9.]+)", said[3].text)[1])
    assert auc == pytest.approx(area_under_curve([s for row in scores for s in row], labels), abs=2e-5)


def area_under_curve(scores: list[float], labels: list[float]) -> float:
    """Share of pairs of a positive and a negative that the scores order correctly; ties count one half."""
    positive = [score for score, label in zip(scores, labels, strict=True) if label]
    negative = [score for score, label in zip(scores, labels, strict=True) if not label]
    right = sum((p > n) + 0.5 * (p == n) for p in positive for n in negative)
    return right / (len(positive) * len(negative))
