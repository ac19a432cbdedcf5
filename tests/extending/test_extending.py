"""Packages outside of the clone add components.

The package of docs/extending.md is imported by a flag, another one, `toys`, is found by its entry point. The
code of the page is extracted and run, so the page cannot rot. `toys` adds the kinds that the page only lists,
among them a model.
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

from recsys.compile_protos import compile_protos
from tests.integration.runs import one_thread, records
from tests.tools import forks

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
TINY, RETRIEVAL = "tests/integration/tiny.config", "configs/movielens_small_retrieval.config"

FEATURES = """features { name: "clock" sides: [USER, HISTORY, CANDIDATE] [acme.clock] {} }
features { name: "upload_type" sides: [HISTORY, CANDIDATE] [toys.words] { num_buckets: 50 } }
features {
  name: "maker" sides: [HISTORY, CANDIDATE]
  [toys.mapped] {
    of: "author_id" table_dim: 8 vocabulary { file: "tests/data/kuairand/vocabulary/author_id.parquet" }
  }
}
"""

BROKEN = {
    "broken": "import no_such_library\n",
    "clash": "from clash import clash_pb2  # noqa: F401\n",
}
CLASH = """edition = "2023"; package clash; import "recsys/protos/train.proto";
message Clash {} extend recsys.Hook { Clash clash = 3000; }
"""

# The extension of `note` needs neither torch nor a class while a config is only read.
NOTE = """edition = "2023"; package note; import "recsys/protos/train.proto";
message Note { string text = 1 [default = "none"]; } extend recsys.Hook { Note note = 3000; }
"""
WRITE_NOTE = """
import pickle, sys
from recsys import config
loaded = config.load("note.config")
assert "torch" not in sys.modules
open("note.pickle", "wb").write(pickle.dumps(loaded))
"""
READ_NOTE = """
import pickle, sys
from recsys import config
from recsys.errors import ConfigError

def refused(**how):
    try:
        config.load("note.config", **how)
    except ConfigError as error:
        print(error)

refused(follow_imports=False)
assert "note" not in sys.modules
loaded = pickle.load(open("note.pickle", "rb"))
from note import note_pb2
print(loaded.train.hooks[0].Extensions[note_pb2.note].text)
refused(imports=["clash"])
"""

GRU_CHECK = """
import torch
from acme.gru import GruMixer, pb
from recsys.modules.sequence import JaggedSequence
from recsys.ops import SequenceLayout

def mixed_by_hand(mixer, x, history):
    # One sample, token by token: h = (1 - z) h + z sigmoid(c); a target is one step behind the history.
    for gate, output in zip(mixer.gates, mixer.outputs):
        h, rows = torch.zeros(x.shape[1]), []
        for token, row in enumerate(x):
            z, c = gate(row).chunk(2)
            state = (1 - z.sigmoid()) * h + z.sigmoid() * c.sigmoid()
            h = state if token < history else h
            rows.append(row + output(state))
        x = torch.stack(rows)
    return x

def main():
    torch.manual_seed(0)
    mixer = GruMixer(pb.GruMixer(num_layers=2), embedding_dim=6)
    lengths, targets = torch.tensor([7, 3, 0, 4]), torch.tensor([2, 3, 0, 0])
    layout = SequenceLayout(lengths, targets, 0)
    x, times = torch.randn(14, 6), torch.zeros(14, dtype=torch.int64)
    parts = x.split(lengths.tolist())
    expected = [mixed_by_hand(mixer, part, n - t) for part, n, t in zip(parts, lengths, targets) if n]
    found = mixer(JaggedSequence(x, layout, times, times)).values
    torch.testing.assert_close(found, torch.cat(expected))
    print("equal")
    return 0
"""

FEATURE_CHECK = """
import zlib
from datetime import datetime, timezone
import pyarrow.parquet as pq
import torch
import acme
from recsys.data.loader import Loader
from recsys.data.schema.vocabulary import mappings
from recsys.models import build_model
from recsys.models.base import layout_rule
from recsys import config

def main():
    pipeline = config.prepare("acme.config").pipeline
    batch = next(Loader.open(pipeline, "validation", layout_rule(pipeline)).epoch())
    rows = pq.read_table("tests/data/kuairand/validation.parquet").slice(0, len(batch.group)).to_pylist()
    model = build_model(pipeline).eval()
    inputs = model.embed(batch)
    for side, times in (("uih", "uih_timestamps"), ("candidate", "candidate_timestamps")):
        most = slice(-20, None) if side == "uih" else slice(0, 5)
        names = lambda column: [value for row in rows for value in row[column][most]]
        clocks = [datetime.fromtimestamp(t, timezone.utc) for t in names(times)]
        seconds = torch.tensor([c.hour * 3600 + c.minute * 60 + c.second for c in clocks]) / 43200 * torch.pi
        torch.testing.assert_close(inputs[side + "_clock"], torch.stack([seconds.sin(), seconds.cos()], 1))
        weights = {k.split(".")[-2]: v for k, v in model.embed.state_dict().items()}
        table = weights["upload_type_table"]
        texts = names(side + "_upload_type")
        buckets = [[zlib.crc32(w.encode()) % 50 for w in text.split()] for text in texts]
        expected = torch.stack([table[b].sum(0) for b in buckets])
        torch.testing.assert_close(inputs[side + "_upload_type"], expected)
        ids = pq.read_table("tests/data/kuairand/vocabulary/author_id.parquet")["id"].to_pylist()
        row_of = mappings(pipeline)["maker"].layout.row_of
        authors = names(side + "_author_id")
        places = [int(row_of(ids.index(author))) if author in ids else 0 for author in authors]
        linear = model.embed.join.encode["maker_feature"]
        torch.testing.assert_close(inputs[side + "_maker"], linear(weights["maker_table"][places]))
    print("equal")
    return 0
"""

METADATA = "Metadata-Version: 2.1\nName: toys\nVersion: 1.0\n"

FIT = """
import acme, recsys
from pathlib import Path

def main():
    hook = f"train.hooks=[{{[acme.score_table] {{file: '{Path.cwd() / 'fit.csv'}'}}}}]"
    model = recsys.build(recsys.config(Path("acme.config"), [hook]))
    print(model)
    recsys.fit(model, steps=1, progress=False)
    return 0
"""

COMMANDS = """
import contextlib, importlib, io, json, sys
results = []
for name, *flags in json.loads(sys.argv[1]):
    sys.argv = [name, *flags]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        code = importlib.import_module(name).main()
    results.append([code, out.getvalue()])
print("\\n" + json.dumps(results))
"""


class Result(NamedTuple):
    """The exit code of a command and what it printed."""

    code: int
    text: str


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A folder with the packages, their compiled protos, and links to the data of the clone."""
    folder = tmp_path_factory.mktemp("project")
    for code in re.findall(r"^```(?:proto|python)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE):
        path = folder / code.splitlines()[0].strip("/# ")
        path.parent.mkdir(exist_ok=True)
        path.write_text(code, encoding="utf-8")
    shutil.copytree(ROOT / "tests" / "extending" / "toys", folder / "toys")
    (folder / "toys-1.0.dist-info").mkdir()
    (folder / "toys-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: toys\nVersion: 1.0\n"
    )
    (folder / "toys-1.0.dist-info" / "entry_points.txt").write_text("[recsys.components]\ntoys = toys\n")
    for name, code in BROKEN.items() | {("note", "from note import note_pb2  # noqa: F401\n")}:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(code)
    (folder / "clash" / "clash.proto").write_text(CLASH)
    (folder / "note" / "note.proto").write_text(NOTE)
    (folder / "gru_check.py").write_text(GRU_CHECK)
    (folder / "feature_check.py").write_text(FEATURE_CHECK)
    (folder / "fit_check.py").write_text(FIT)
    for name in ("tests", "configs"):
        (folder / name).symlink_to(ROOT / name)
    compile_protos([folder / name for name in ("acme", "toys", "clash", "note")])
    rows = pq.read_table(ROOT / "tests/data/kuairand/train.parquet").slice(0, 64).to_pylist()
    (folder / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "acme.config").write_text(acme_config(), encoding="utf-8")
    return folder


def acme_config() -> str:
    """The tiny config, with components of the page in place of built-in ones."""
    text = (ROOT / TINY).read_text(encoding="utf-8")
    changes = {
        'train { parquet { paths: "tests/data/kuairand/train.parquet" } }': (
            'train { [acme.json_lines] { paths: "*.jsonl" } }'
        ),
        "mixer { hstu { num_layers: 1 num_heads: 2 qk_dim: 8 dropout: 0.1 } }": (
            "mixer {\n      [ acme.gru ] { num_layers: 2 }\n    }"
        ),
        "loss { mean_squared_error { log1p: true } }": "loss { [acme.huber] { delta: 2 } }",
        "metrics { mae {} } }": "metrics { [acme.within] { range: 20 } } metrics { mae {} } }",
        'features { name: "hour"': f'{FEATURES}features {{ name: "hour"',
        "num_steps: 16": "num_steps: 2\n  hooks { [acme.score_table] {} }",
        "adamw { lr: 2e-3 weight_decay: 0.01 }": "[acme.signum] { weight_decay: 0.01 }",
        "warmup_steps: 4 cosine {}": "[acme.inverse_root] { flat_steps: 1 }",
        "every_steps: 6": "every_steps: 2",
    }
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def python(project: Path, *arguments: str) -> str:
    """Runs Python in the project, which sees its packages and the clone's; returns what it prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=project,
        env=one_thread() | {"PYTHONPATH": f"{project}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python_fork(project: Path, code: str, *arguments: str) -> str:
    """Runs code as `python` does, in a process that has imported the clone but nothing of the project;
    returns what it prints."""
    script = project / "script.py"
    script.write_text(code)
    path = f"{project}:{ROOT}"
    process = forks.server().start(
        "tests.tools.forks:run_script", str(script), *arguments, cwd=project, PYTHONPATH=path
    )
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return output


def commands(project: Path, *lines: list[str]) -> list[Result]:
    """Runs commands, each a module with its flags, one after the other in one process."""
    printed = python_fork(project, COMMANDS, json.dumps(lines))
    return [Result(*entry) for entry in json.loads(printed.splitlines()[-1])]


def train(config: str, *flags: str, **overrides: str) -> list[str]:
    return ["recsys.train", "--config", config, *flags]


def settings(*overrides: str) -> list[str]:
    return [part for override in overrides for part in ("--set", override)]


ACME = train("acme.config", "--import", "acme")
MIXER, WATCH_TIME = "model.ranker.mixer", "model.ranker.tasks[1]"
LINE = acme_config().splitlines().index("      [ acme.gru ] { num_layers: 2 }") + 1
MISTAKES = {
    # Before anything is imported.
    f"acme.config:{LINE}: {MIXER}.[acme.gru]: no such extension is registered; give --import": train(
        "acme.config", "--validate"
    ),
    "--import nix: cannot be imported: ModuleNotFoundError: No module named 'nix'. Install it": train(
        "acme.config", "--import", "nix"
    ),
    "--import broken: cannot be imported: ModuleNotFoundError: No module named 'no_such_library'": train(
        "acme.config", "--import", "broken"
    ),
    f"{MIXER}.[acme.gru].num_layer: no such field. Did you mean num_layers?": [
        *ACME,
        *settings(f"{MIXER}={{[acme.gru] {{num_layer: 2}}}}"),
    ],
    f"{MIXER}.[acme.gruu]: no such extension is registered. Did you mean [acme.gru]?": [
        *ACME,
        *settings(f"{MIXER}={{[acme.gruu] {{}}}}"),
    ],
    "features[2].[acme.clok]: no such extension is registered. Did you mean [acme.clock]?": [
        *ACME,
        *settings("features=[{name: 'a' sides: USER}, {name: 'b' sides: USER}, {[acme.clok] {}}]"),
    ],
    "features[2].[acme.clock].period_seconds: 0 is given; it must be 1 or more": [
        *ACME,
        *settings("features[2].[acme.clock].period_seconds=0"),
    ],
    "features[3]: words is no name": [*ACME, *settings("features[3].name='words'")],
    "features[4].[toys.mapped]: it reads the column uih_tag, in which feature tag finds lists": [
        *ACME,
        *settings("features[4].[toys.mapped].of='tag'"),
    ],
    "features[4].[toys.mapped].vocabulary.file: no file none.parquet": [
        *ACME,
        *settings("features[4].[toys.mapped].vocabulary.file='none.parquet'"),
    ],
    f"{MIXER}.[acme.huber]: extends Loss, so it cannot be used in Mixer": [
        *ACME,
        *settings(f"{MIXER}.[acme.huber].delta=2"),
    ],
    f"{MIXER}.hstu: [acme.gru] is chosen; replace it first": [*ACME, *settings(f"{MIXER}.hstu.num_heads=2")],
    f"{MIXER}.sasrec: only one of these may be set, but line 1 sets [acme.gru]; keep one": [
        *ACME,
        *settings(f"{MIXER}={{[acme.gru] {{}} sasrec {{}}}}"),
    ],
    "data.[acme.gru]: Data takes no extensions. Allowed here: train, validation": [
        *ACME,
        *settings("data={[acme.gru] {}}"),
    ],
    f"{WATCH_TIME}.loss.[acme.huber].delta: -1.0 is given; it must be above 0": [
        *ACME,
        *settings(f"{WATCH_TIME}.loss.[acme.huber].delta=-1"),
    ],
    "model.ranker.tasks[0].metrics[0].[acme.within]: does not fit a binary task; use one of auc": [
        *ACME,
        *settings("model.ranker.tasks[0].metrics=[{[acme.within] {}}]"),
    ],
    # An entry point needs no flag.
    f"{WATCH_TIME}.loss.[toys.unsaid]: toys/toys.proto does not say which labels": train(
        TINY, *settings(f"{WATCH_TIME}.loss={{[toys.unsaid] {{}}}}")
    ),
    f"{WATCH_TIME}.loss.[toys.unsaid]: no class is registered for toys.UnsaidLoss": train(
        TINY, *settings(f"{WATCH_TIME}.loss={{[toys.unsaid] {{}}}}")
    ),
    f"{MIXER}.[toys.token].num_heads: does not divide model.embedding_dim": train(
        TINY, *settings(f"{MIXER}={{[toys.token] {{num_heads: 3}}}}")
    ),
    f"{MIXER}.[toys.token].num_layers: 0 is given; it must be 1 or more": train(
        TINY, *settings(f"{MIXER}={{[toys.token] {{num_layers: 0}}}}")
    ),
    "export.cached_scoring: mixer.[toys.token] cannot score with a cache; remove this setting": train(
        TINY, *settings("export.cached_scoring=true", f"{MIXER}={{[toys.token] {{}}}}")
    ),
    "model.[toys.dot].tasks: a dot weighs its tasks with at least 1": train(
        TINY,
        *settings("model={[toys.dot] {tasks {name: 'is_click' weight: 0.5 loss {binary_cross_entropy {}}}}}"),
    ),
    "model.retriever.preprocessor.[toys.bare]: does not fit a retriever; use uih": train(
        RETRIEVAL, *settings("model.retriever.preprocessor={[toys.bare] {}}")
    ),
}
TOYS = train(
    TINY,
    *settings(
        "model.ranker.preprocessor={[toys.bare] {}}",
        f"{MIXER}={{[toys.token] {{num_layers: 2}}}}",
        "model.ranker.head={[toys.linear] {}}",
    ),
)
TASK = "tasks {name: 'is_click' loss {binary_cross_entropy {}} metrics {auc {}} metrics {gauc {}}}"
DOT = train(
    TINY, *settings(f"model={{[toys.dot] {{{TASK}}} embedding_dim: 16}}", "train.schedule={constant {}}")
)


@pytest.fixture(scope="module")
def results(project) -> dict[str, Result]:
    """Results of all commands that need no other process than one, by name; of mistakes, by their text."""
    lines = {text: [*line, "--validate"] for text, line in MISTAKES.items()} | {
        "gru": ["gru_check"],
        "features": ["feature_check"],
        "fit": ["fit_check"],
        "validate": [*ACME, *settings(f"{MIXER}.[acme.gru].num_layers=3"), "--validate"],
        "print": [*ACME, "--print-config"],
        "train": [*ACME, "--run-dir", "acme_run"],
        "print again": train("acme_run/config.resolved", "--print-config"),
        "resume": ["recsys.train", "--run-dir", "acme_run", *settings("train.num_steps=3")],
        "other config": [
            *ACME,
            "--run-dir",
            "acme_run",
            *settings(f"{MIXER}.[acme.gru].num_layers=3", "train.num_steps=4"),
        ],
        "toys print": [*TOYS, "--print-config"],
        "toys": [*TOYS, "--run-dir", "toys_run", "--dry-run"],
        "dot": [*DOT, "--run-dir", "dot_run", *settings("train.num_steps=2", "data.max_candidates=4")],
        "dot resume": ["recsys.train", "--run-dir", "dot_run", *settings("train.num_steps=4")],
        "dot evaluate": ["recsys.evaluate", "--run-dir", "dot_run", "--split", "validation"],
        "dot width": [
            "recsys.evaluate",
            "--run-dir",
            "dot_run",
            "--split",
            "validation",
            *settings("model.[toys.dot].width=8"),
        ],
    }
    return dict(zip(lines, commands(project, *lines.values()), strict=True))


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_is_named_with_its_place(results, text):
    assert results[text].code == 2 and text in results[text].text, results[text].text


def test_the_errors_of_the_page_are_those_of_the_commands(results):
    shown = re.findall(r"^my.config:41: (.*)$", PAGE, re.MULTILINE)
    assert shown and all(any(line in result.text for result in results.values()) for line in shown)


def test_the_mixer_of_the_page_is_short_and_computes_its_formula(project, results):
    files = [project / "acme" / name for name in ("gru.proto", "gru.py")]
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) < 60
    assert results["gru"] == (0, "equal\n"), results["gru"].text


def test_kinds_of_features_convert_and_embed_as_their_formulas_say(results):
    assert results["features"] == (0, "equal\n"), results["features"].text


def test_a_printed_config_is_read_back_as_the_same(project, results):
    assert results["validate"] == (0, "ok\n")
    printed = results["print"].text
    assert "[acme.gru] {\n        num_layers: 2\n" in printed and 'imports: ["acme"]' in printed
    assert 'file: "scores.csv"  # default' in printed
    assert re.sub("  # .*", "", printed) == results["print again"].text


def test_components_of_the_page_train_and_resume_without_a_flag(project, results):
    assert results["train"].code == 0, results["train"].text
    assert results["resume"].code == 0, results["resume"].text
    assert re.search(r"resuming from .*step-0*2\b", results["resume"].text)
    evaluated = records(project / "acme_run", "evaluation")
    assert 0 <= evaluated[2]["metrics"]["watch_time/within"] <= 1
    rates = {step: record["lr"]["dense"] for step, record in records(project / "acme_run").items()}
    assert rates == pytest.approx({1: 1e-4, 2: 1e-4, 3: 1e-4 * 0.5**0.5})
    table = (project / "acme_run" / "scores.csv").read_text().splitlines()
    written = {(int(step), name): float(value) for step, name, value in (line.split(",") for line in table)}
    assert written.keys() >= {(2, "is_click/auc"), (3, "is_click/auc"), (3, "watch_time/within")}
    assert written[2, "loss"] == evaluated[2]["metrics"]["loss"]
    assert results["other config"].code == 2
    assert f"{MIXER}.[acme.gru].num_layers: 2" in results["other config"].text


def test_components_train_from_python_with_the_hooks_of_the_config(project, results):
    assert results["fit"].code == 0 and "ranker with" in results["fit"].text, results["fit"].text
    lines = (project / "fit.csv").read_text().splitlines()
    assert any(line.startswith("1,watch_time/within,") for line in lines)


def test_components_of_an_entry_point_train(results):
    assert results["toys"].code == 0, results["toys"].text
    assert "num_heads: 2  # model.embedding_dim / 8" in results["toys print"].text
    assert "loss of the first step" in results["toys"].text
    kernel = f"kernel of softmax_attention: reference (cpu, float32, {MIXER}.[toys.token].backend"
    assert kernel in results["toys"].text
    assert "TokenMixer declares no rules for its layers" in results["toys"].text


def test_a_model_of_another_package_trains_resumes_and_evaluates(results):
    for name in ("dot", "dot resume", "dot evaluate"):
        assert results[name].code == 0, results[name].text
    assert "data.max_candidates: a dot can take any number" in results["dot"].text
    assert re.search(r"resuming from .*step-0*2\b", results["dot resume"].text)
    assert "is_click/auc" in results["dot evaluate"].text
    width = results["dot width"]
    assert width.code == 2
    assert "model.[toys.dot].tasks.metrics" in width.text and "model.[toys.dot].width: 16" in width.text


def test_another_process_imports_what_a_config_needs(project):
    (project / "note.config").write_text('imports: "note" train { hooks { [note.note] { text: "seen" } } }')
    python(project, "-c", WRITE_NOTE)
    unknown, hint, text, clash = python_fork(project, READ_NOTE).splitlines()
    assert unknown.startswith("note.config:1: train.hooks[0].[note.note]: no such extension is registered")
    assert hint.startswith("note.config: it was made with --import note")
    assert text == "seen"
    assert clash.startswith("--import clash: cannot be imported: TypeError: ")
    assert "duplicate extension entry. Its .proto uses a name or number that is already taken" in clash


@pytest.mark.slow
def test_packages_with_components_of_others_answer_as_evaluated(project, results):
    assert results["resume"].code == results["dot evaluate"].code == 0
    # A fresh process: the run folder says what to import, the package does not.
    rows = ["--input", "tests/data/kuairand/validation.parquet"]
    predict = ["recsys.predict", "--run-dir", "acme_run", *rows]
    done = commands(
        project,
        ["recsys.predict", "--run-dir", "missing", *rows],
        ["recsys.export", "--run-dir", "acme_run"],
        ["recsys.export", "--run-dir", "dot_run"],
        ["recsys.predict", "--run-dir", "dot_run", *rows],
    )
    assert [result.code for result in done] == [2, 0, 0, 0], done
    refused, predicted = commands(project, predict, [*predict, "--import", "acme"])
    assert refused.code == 2 and "it was made with --import acme" in refused.text
    assert predicted.code == 0, predicted.text
    description = json.loads((project / "dot_run" / "export" / "package.json").read_text(encoding="utf-8"))
    assert (description["kind"], description["outputs"]) == ("[toys.dot]", ["is_click"])
    parts = sorted((project / "dot_run" / "predictions").glob("part-*.parquet"))
    table = pa.concat_tables([pq.read_table(part) for part in parts])
    assert table.column_names == ["user_id", "request_id", "candidate_item_id", "is_click"]
    rows = pq.read_table(ROOT / "tests/data/kuairand/validation.parquet")
    assert table["candidate_item_id"].to_pylist() == rows["candidate_item_id"].to_pylist()
    scores = table["is_click"].to_pylist()
    assert all(0 < score < 1 for row in scores for score in row)
    # The package's scores rank the rows as the command evaluated them.
    labels = [label for row in rows["candidate_is_click"].to_pylist() for label in row]
    auc = float(re.search(r"is_click/auc +([0-9.]+)", results["dot evaluate"].text)[1])
    assert auc == pytest.approx(area_under_curve([s for row in scores for s in row], labels), abs=2e-5)


def area_under_curve(scores: list[float], labels: list[float]) -> float:
    """Share of pairs of a positive and a negative that the scores order correctly; ties count one half."""
    positive = [score for score, label in zip(scores, labels, strict=True) if label]
    negative = [score for score, label in zip(scores, labels, strict=True) if not label]
    right = sum((p > n) + 0.5 * (p == n) for p in positive for n in negative)
    return right / (len(positive) * len(negative))
