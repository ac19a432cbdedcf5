"""Runs the code of every notebook in docs/notebooks, in the root of the repository, as they ask."""

import ast
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))


def code_cells(path: Path) -> list[dict]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_there_is_a_notebook():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    names: dict = {}
    for number, cell in enumerate(code_cells(path)):
        assert not cell["outputs"], f"cell {number}: a notebook is stored without outputs"
        code = compile(ast.parse("".join(cell["source"])), f"{path.name}, code cell {number}", "exec")
        exec(code, names)  # noqa: S102
    # The notebook trains: the loss falls, and recommendations are items that their user has not had.
    losses = names["losses"].losses
    assert losses[-1] < losses[0]
    for row, latest in zip(names["answer"].to_pylist(), names["data"].latest.to_pylist(), strict=True):
        assert len(row["item_id"]) == 5 and not set(row["item_id"]) & set(latest["uih_item_id"])
