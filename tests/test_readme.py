"""Runs the commands of README, CONTRIBUTING, docs/ and examples/ as written, where a reader could type them.

Each one is in `RUN`, with what is added to make it short, or in `NOT_RUN`, with the reason. A command that
stands on several pages runs once.
"""

import csv
import gzip
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.runs import one_thread
from tests.tools import forks

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("**/*.md")),
    *sorted((ROOT / "examples").glob("**/*.md")),
]

SHORT = (
    "--set train.num_epochs= --set train.num_steps=6 --set train.schedule={} --set data.num_workers=0 "
    "--set train.evaluation.every_steps=6 --set data.batch_size=4"
)
RUN = {
    "recsys prepare csv --input clicks.csv.gz --output data/clicks --task retrieval "
    "--user-column uid --item-column sku --time-column ts --time-unit ms": "",
    "recsys train --config data/clicks/starter.config --run-dir runs/clicks": SHORT,
    "recsys train --config data/clicks/starter.config --run-dir runs/clicks-wide "
    "--set model.embedding_dim=128": "--validate",
    "recsys evaluate --run-dir runs/clicks": "",
    # A package takes a minute to compile: the quickstart makes one, and predicts with it.
    "recsys export --run-dir runs/clicks": "--dry-run",
    "recsys predict --package runs/clicks/export --input data/clicks/latest "
    "--output runs/clicks/recommendations": "--help",
    "recsys train --config x.config --validate": "",
    "recsys train --config x.config --print-config": "",
    "recsys train --config x.config --profile 20": f"{SHORT} --run-dir runs/profiled "
    "--set train.num_steps=2 --set train.evaluation={}",
    "recsys train --config x.config --dry-run": "--set data.num_workers=0",
    "recsys train --config x.config --set train.seed=2 --set model.embedding_dim=128": "--validate",
    "torchrun --nproc-per-node 2 -m recsys.train --config x.config": "--validate",
    "python scripts/install.py --dev": "--dry-run",
    "python scripts/config_reference.py": "--check",
    "python scripts/draw_docs.py": "--check",
}
NOT_RUN = {
    "scripts/quickstart": "tests/integration/test_quickstart.py",
    "scripts/test": "it is what runs this test",
    "scripts/test --slow": "it is what runs the tests that this one leaves out",
    "recsys train --config configs/ml_1m_hstu.config --run-dir runs/ml_1m_hstu": "its data is not "
    "bundled; tests/integration/test_ready_configs.py trains every ready config",
    "recsys evaluate --run-dir runs/ml_1m_hstu": "the same",
    "recsys train --config configs/quickstart.config --run-dir runs/quickstart": "the quickstart runs it",
    "recsys evaluate --run-dir runs/quickstart": "the quickstart runs it",
    "recsys evaluate --run-dir runs/clicks --split validation": "tests/integration/test_commands.py",
    "recsys evaluate --run-dir runs/clicks --checkpoint newest": "tests/integration/test_commands.py",
    "recsys evaluate --package runs/clicks/export --run-dir runs/clicks": "tests/integration/"
    "test_evaluate_package.py",
    "recsys evaluate --package runs/clicks/export": "the same",
    "python scripts/bench_scaling.py": "tests/scripts/test_bench_scaling.py, with a small model",
    "python scripts/cost_model.py --config scripts/bench_scaling.config "
    "--set 'features[1].id.hash.num_buckets=1000000000' --gpus 8 64 256 1000 "
    "--activation-bytes 180000": "test_cost_model.py compares what it prints",
    "torchrun --standalone --nproc-per-node 8 scripts/bench_collectives.py "
    "--record collectives.json": "tests/scripts/test_bench_collectives.py, on two ranks",
    "python scripts/compile_protos.py": "the tests import what it makes",
    "python scripts/update_golden.py": "tests/test_golden.py compares what it writes",
    "python -m mkdocs serve": "it serves until it is stopped; tests/test_docs.py builds the site",
    "recsys init my_project": "tests/test_init.py",
    "recsys init my_project --config NAME": "the same",
    "recsys init --help": "the same",
    "python -m recsys.train": "the name of a command, without its flags",
    "python scripts/install.py": "it changes the environment; tests/test_install.py",
    "recsys doctor": "tests/test_doctor.py",
    "recsys install": "it changes the environment; tests/test_install.py",
    "recsys prepare csv --input log.parquet --output data/log --task ranking --user-column uid "
    "--item-column sku --time-column when --time-unit iso --label click=clicked --action click=clicked "
    "--item-feature brand": "tests/prepare makes ranking data of many logs",
    "recsys blend --run-dir runs/clicks": "tests of recsys.blend run it on a model that learned something",
    "torchrun --nproc-per-node 4 -m recsys.predict --package runs/clicks/export --input data/clicks/latest "
    "--output scores": "tests/integration/test_predict_processes.py",
    "recsys export --run-dir runs/clicks --format triton --output models": "tests/integration/test_triton.py",
    "recsys export --run-dir runs/clicks "
    "--set 'export.tables={memory_map_above_bytes: 100000000 dtype: INT8}'": "tests/inference",
    "recsys export --run-dir runs/clicks --sign-key key.pem": "tests/inference/test_package_files.py",
    "recsys predict --package runs/clicks/export --verify-key key.pub --input data/clicks/latest "
    "--output scores": "tests/integration/test_signed.py",
    "python examples/cpp/prepare.py runs/quickstart/export runs/quickstart/cpp": "tests/integration/"
    "test_cpp.py",
    "recsys predict --run-dir runs/clicks --checkpoint best --input FILES": "tests/integration/"
    "test_export_predict.py",
    "recsys predict --run-dir runs/clicks --set 'predict.index={faiss {}}'": "it needs a package and faiss; "
    "tests/inference",
    "recsys sweep --config x.config --vary 'model.embedding_dim=[32,64]' "
    "--vary 'train.seed=[1,2]'": "tests/training/test_sweep.py",
    "recsys sweep --config x.config --find-lr": "the same",
    "recsys baseline --config x.config": "tests/evaluation/test_item_means.py",
    "recsys serve --package runs/clicks/export --port 8000": "tests/integration/test_serve.py",
    "recsys serve --help": "tests/test_main.py",
    "recsys sid embed --data tests/data/movielens --output data/vectors": "tests/sid/test_docs.py",
    "recsys sid fit --embeddings data/vectors --output data/bundle --balanced": "the same",
    "recsys sid report --bundle data/bundle": "the same",
    "python -m recsys.train --config configs/movielens_small_generator.config "
    "--run-dir runs/movielens_generator": "minutes; test_ready_configs.py trains a part of it",
    "python -m recsys.evaluate --run-dir runs/movielens_generator --compare-exact "
    "--set 'model.generator.decoding={beam_size: 200}'": "it needs that run; tests/models/test_generator.py",
    "recsys evaluate --compare-popularity": "the name of a flag; tests/models/test_popularity.py",
    "python -m recsys.evaluate --run-dir runs/movielens_generator "
    "--set 'model.generator.decoding.items=\"stock.parquet\"'": "it needs that run; "
    "tests/models/test_generator.py",
    "recsys evaluate --run-dir runs/beauty-cold --set 'model.generator.decoding="
    '{method: EXACT items: "data/beauty-cold/held_out.parquet"}\'': "its data is not bundled; "
    "tests/models/test_generator.py",
    "python -m recsys.train --config experiments/2026-11-28-sid-quality/tiger.config "
    "--run-dir runs/amazon_beauty_tiger": "no bundled data; tests/models/test_generator.py has such a model",
    "recsys sid fit --embeddings data/vectors --output data/opq --quantizer opq --levels 16": "it needs "
    "faiss; tests/sid/test_quantizers.py",
    "python -m recsys.train --config configs/movielens_small_parallel.config "
    "--run-dir runs/movielens_parallel": "minutes; test_ready_configs.py trains a part of it",
    "python -m recsys.train --config configs/movielens_small_parallel.config "
    "--run-dir runs/movielens_hybrid --set 'model.generator.ids={}'": "minutes; "
    "tests/models/test_generator.py",
    "python -m recsys.evaluate --run-dir runs/movielens_hybrid --split validation --compare-weights": "it "
    "needs that run; tests/models/test_generator.py",
    "recsys sid embed --data data/new --like data/bundle --output data/new-vectors": "tests/sid/"
    "test_bundle.py",
    "python -m recsys.prepare cold-start --input data/beauty --output data/beauty-cold --share 0.02": "its "
    "data is not bundled; tests/prepare/test_cold_start.py",
    "recsys sid append --bundle data/bundle --embeddings data/new-vectors --output data/bundle-2": "the same",
    "recsys sid embed --data data/beauty --output data/beauty-vectors --items item_text.jsonl "
    "--item-column id --text-column title --text-column categories": "its data is not bundled; "
    "tests/sid/test_sources.py reads such a table",
    "scripts/gpu_check experiments/2026-12-31-my-gpu": "it needs a GPU",
    "scripts/gpu_check": "it needs a GPU",
    "python -m tests.fuzz --cases 500": "minutes; tests/fuzz runs a part of it",
    "scripts/test tests/ops -k mask": "a part of what runs this test",
    "scripts/test tests/ops/linear_logp -k interpret": "the same",
    "scripts/test tests/ops/hstu_attention/test_triton_compile.py": "the same",
    "scripts/test tests/ops/hstu_attention/test_hopper_emulated.py": "the same",
    "scripts/test tests/ops/<op>": "a pattern, not a command",
}
COMMAND = re.compile(
    r"(python|torchrun) \S|scripts/\w+( |$)|recsys (doctor|install)$|recsys [a-z-]+ .*(--\w|my_project)"
)
MODULES = {"recsys": "recsys", "torchrun": "torch.distributed.run"}
"""The module of each program that is not a script of this repository."""
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
OWN_TESTS = ("extending.md",)
"""Pages whose code a test of their own extracts and runs."""


def commands(text: str) -> list[str]:
    """Command lines of fenced blocks and of code within sentences, without comments and double spaces."""
    blocks = [block for language, block in FENCED.findall(text) if not language]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    lines += re.findall(r"`([^`\n]+)`", FENCED.sub("", text))
    plain = (re.sub(r"\s+", " ", line.split(" # ")[0].split("  #")[0]).strip() for line in lines)
    return [line for line in plain if COMMAND.match(line)]


def all_commands() -> list[str]:
    """Commands of all pages, each once, in the order of pages."""
    pages = [page.read_text(encoding="utf-8") for page in PAGES if page.name not in OWN_TESTS]
    return list(dict.fromkeys(line for page in pages for line in commands(page)))


def test_every_command_is_run_or_has_a_reason():
    assert set(all_commands()) == RUN.keys() | NOT_RUN.keys()


def test_commands_are_found():
    text = "`python -m a`, `recsys b --c`, `a.py`\n\n```\npython b \\\n    --c   # why\n+ python no\n```\n"
    assert commands(text) == ["python b --c", "python -m a", "recsys b --c"]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder like a checkout, with a user's log of clicks and config."""
    folder = tmp_path_factory.mktemp("home")
    for name in ("recsys", "scripts", "tests", "configs", "protos", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "x.config").write_text((ROOT / "configs/quickstart.config").read_text(encoding="utf-8"))
    with gzip.open(folder / "clicks.csv.gz", "wt", newline="") as file:
        csv.writer(file).writerows(clicks())
    return folder


def clicks() -> Iterator[tuple[str, str, str]]:
    """A header, and events of 40 users with up to 20 items, in no order of time."""
    yield "uid", "sku", "ts"
    draw = random.Random(1)
    for user in range(40):
        for _ in range(draw.randint(3, 20)):
            yield f"u{user}", f"sku-{draw.randint(0, 60)}", str(1_700_000_000_000 + draw.randrange(10**9))


@pytest.fixture(scope="module")
def outputs(home) -> dict[str, str]:
    """Output of each command of `RUN`, run in order since they build on each other."""
    results = {}
    for line in all_commands():
        if line in RUN:
            results[line] = run([*shlex.split(line), *shlex.split(RUN[line])], home)
    return results


def run(words: list[str], folder: Path) -> str:
    """Runs a command line with the Python of the tests; returns what it printed.

    `recsys`, `torchrun` and scripts run in forks, which import nothing again; `tests/test_main.py` starts
    `recsys` as a process.
    """
    program, *rest = words
    if program in MODULES or rest[0].startswith("scripts/"):
        target = ("run_module", MODULES[program]) if program in MODULES else ("run_script",)
        process = forks.server().start(f"tests.tools.forks:{target[0]}", *target[1:], *rest, cwd=folder)
        output, code = process.communicate()[0], process.returncode
    else:
        environment = one_thread() | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, *rest], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        output, code = done.stdout + done.stderr, done.returncode
    assert code == 0, f"{shlex.join(words)}\n{output}"
    return output


def test_commands_run(outputs, home):
    assert outputs.keys() == RUN.keys()
    assert (home / "runs/clicks/report.html").is_file() and (home / "runs/clicks/test_metrics.json").is_file()
    assert "ndcg@10" in outputs["recsys evaluate --run-dir runs/clicks"]
    (validated,) = (text for line, text in outputs.items() if line.endswith("x.config --validate"))
    assert validated.strip().endswith("ok")
    (printed,) = (text for line, text in outputs.items() if line.endswith("--print-config"))
    assert "model.embedding_dim" in printed
    (shown,) = (text for line, text in outputs.items() if line.endswith("--dry-run"))
    assert "position  kind" in shown and not (home / "runs/x").exists()


def test_the_python_snippet_of_the_readme_runs(outputs, home, monkeypatch, capsys):
    text = PAGES[0].read_text(encoding="utf-8")
    (snippet,) = (block for language, block in FENCED.findall(text) if language == "python")
    monkeypatch.chdir(home)
    exec(compile(snippet.replace("steps=300", "steps=2"), "README.md", "exec"), {})  # noqa: S102
    printed = capsys.readouterr().out
    assert "user_id" in printed and "item_id" in printed
