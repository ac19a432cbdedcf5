"""The documentation builds without a network, its links lead somewhere, its pictures show the code."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from recsys import config
from scripts import docs_hooks, draw_docs

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").glob("**/*.md"))
FOLDERS = ("experiments", "examples")
TEXTS = [*PAGES, *sorted(ROOT.glob("*.md")), *(x for y in FOLDERS for x in sorted(ROOT.glob(f"{y}/**/*.md")))]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_pictures_are_drawn_from_the_code():
    assert len(draw_docs.kinds(1, 2, 1)) == 4
    assert draw_docs.differing() == [], "type: python scripts/draw_docs.py"


@pytest.mark.skipif(
    importlib.util.find_spec("material") is None or importlib.util.find_spec("mkdocstrings") is None,
    reason="MkDocs is not installed: pip install -e '.[docs]'",
)
def test_the_site_builds_and_needs_no_network(tmp_path):
    """Strict: a missing page, anchor or documented name is an error."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in (tmp_path / "index.html", tmp_path / "concepts/index.html"):
        loaded = re.findall(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="([^"]+)"', page.read_text())
        assert loaded and not [address for address in loaded if re.match(r"(https?:)?//", address)]


@pytest.mark.parametrize("path", TEXTS, ids=name)
def test_links_to_files_of_the_repository_lead_somewhere(path):
    """MkDocs checks links between pages; links of the web are not followed."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]*`(?!\])", "", text)
    for _, target in docs_hooks.LINK.findall(text):
        if docs_hooks.is_relative(target):
            file, _, anchor = target.partition("#")
            assert (path.parent / file).exists(), target
            linked = path.parent / file if file else path
            if anchor and linked.suffix == ".md":
                assert anchor in anchors(linked), target


@pytest.mark.parametrize("path", [*PAGES, *sorted(ROOT.glob("*.md"))], ids=name)
def test_files_that_a_page_names_exist(path):
    named = re.findall(
        r"`((?:scripts|configs|recsys|tests|examples)/[\w./-]+)`", path.read_text(encoding="utf-8")
    )
    assert [file for file in named if not (ROOT / file).exists()] == []


def test_every_experiment_is_in_the_index():
    index = (ROOT / "experiments/README.md").read_text(encoding="utf-8")
    readmes = sorted(ROOT.glob("experiments/**/*/README.md"))
    folders = [path.parent for path in readmes]
    missing = [path.name for path in folders if f"({path.relative_to(ROOT / 'experiments')}" not in index]
    assert folders and missing == []


def anchors(path: Path) -> set[str]:
    """Anchors of the headings of a Markdown file, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def whole_configs() -> list[tuple[str, str]]:
    """Page and text of each fenced block that is a whole config."""
    results = []
    for path in TEXTS:
        blocks = re.findall(r"^```\w*\n(.*?)^```", path.read_text(encoding="utf-8"), re.M | re.S)
        results += [
            (name(path), block) for block in blocks if re.match(r"data\b", block) and "model {" in block
        ]
    return results


def test_configs_of_the_pages_are_valid(tmp_path):
    blocks = whole_configs()
    assert blocks
    for page, block in blocks:
        file = tmp_path / "page.config"
        file.write_text(block)
        assert config.prepare(file, [], read_files=False).pipeline.model.embedding_dim > 0, page


@pytest.mark.parametrize(
    ("text", "url", "expected"),
    [
        ("[a](b.md#c)", "", "[a](b.md#c)"),
        ("[`a`](../recsys/a.py)", "", "`a`"),
        ("[`a`](../recsys/train.py)", "https://x/y", "[`a`](https://x/y/blob/main/recsys/train.py)"),
        ("[a](../configs)", "https://x/y/", "[a](https://x/y/tree/main/configs)"),
        ("![a](figures/a.svg) [b](https://c)", "", "![a](figures/a.svg) [b](https://c)"),
    ],
)
def test_links_of_a_page_on_the_site(text, url, expected):
    assert docs_hooks.prepared(text, "docs", url) == expected


def test_an_included_file_keeps_its_links():
    text = docs_hooks.prepared('--8<-- "configs/REFERENCE.md"', "docs", "")
    assert "### Pipeline" in text and "[Pipeline](#pipeline)" in text
