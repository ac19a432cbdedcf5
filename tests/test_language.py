"""The language of the code: variables bear names of their content, docstrings begin with their subject."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EMPTY_WORDS = {"one", "own", "found", "some", "other"}
DANGLING = re.compile(r"\s*(Of|What|Where|That|Which|How|Whom)\b.*")
PAIRS = {"hstu_attention/bias", "hstu_attention/triton"}
"""Folders of kernels that call the operands of a score `one` and `other`, and a program's share its `own`."""


def faults_of(source: str) -> set[str]:
    """Variables and parameters whose names say nothing, and strings that stand alone, as docstrings do, and
    begin with a word that leans on the name above. `other` may be a parameter, as in Python and Triton."""
    faults = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and node.id in EMPTY_WORDS and isinstance(node.ctx, ast.Store):
            faults.add(node.id)
        elif isinstance(node, ast.arg) and node.arg in EMPTY_WORDS - {"other"}:
            faults.add(node.arg)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str) and (start := DANGLING.match(node.value.value)):
                faults.add(start.group())
    return faults


def test_names_have_content_and_docstrings_a_subject():
    faults = {}
    for folder in ("recsys", "scripts", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            place = str(path.relative_to(ROOT))
            if not place.endswith("_pb2.py"):
                faults[place] = faults_of(path.read_text(encoding="utf-8"))
                if any(pair in place for pair in PAIRS):
                    faults[place] -= EMPTY_WORDS
    assert {place: words for place, words in faults.items() if words} == {}


def test_the_rules_find_what_they_are_for():
    source = 'def f(own, other):\n    """Of a name."""\n    found = [one for one in own]\n'
    assert faults_of(source) == {"own", "found", "one", "Of a name."}
