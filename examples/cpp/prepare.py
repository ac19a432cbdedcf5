"""Writes what the C++ program reads of a package: `python prepare.py PACKAGE FOLDER`.

model.pt2     the compiled program, after the package's hashes and golden rows were checked
recipe.json   how each input of the program is made of the columns of a row
TABLE.ids     a line "ROW<tab>ID" for each id of a vocabulary: the row of its embedding table
"""

import json
import shutil
import sys
from pathlib import Path

from recsys import protos as pb
from recsys.config import features
from recsys.data.schema.contract import FileColumn, Kind, file_columns
from recsys.data.schema.vocabulary import Vocabulary, mappings
from recsys.errors import RecsysError
from recsys.inference.package import MODEL, Package
from recsys.models.base import layout_rule

SIDES = {pb.USER: "user", pb.HISTORY: "history", pb.CANDIDATE: "candidate"}
LENGTHS = {"uih_lengths": "history", "num_candidates": "candidate"}
NOT_IN_ROWS = {"uih_actions": "integers", "uih_watch_time": "reals"}
"""Inputs that are zeros if the model does not read the column."""


def main(folder: Path, output: Path) -> None:
    """Writes the folder.

    Raises:
        RecsysError: the package needs something that the C++ program does not do.
    """
    package = Package(folder)
    pipeline = package.pipeline
    rule = layout_rule(pipeline)
    if package.items is not None or rule.channels or package.description.op_libraries or package.cached:
        raise RecsysError(
            f"{folder}: the example scores rankers without channels, Python operators and caches"
        )
    if package.description.tables:
        raise RecsysError(
            f"{folder}: the example does not look up tables that are files of their own; export with a "
            "larger export.tables.memory_map_above_bytes"
        )
    output.mkdir(parents=True, exist_ok=True)
    columns = {column.name: column for column in file_columns(pipeline, "predict")}
    recipe = {
        "inputs": [_input(entry["name"], columns) for entry in package.description.inputs],
        "keys": [*pipeline.data.key_columns, features.candidate_item(pipeline)],
        "candidate": features.candidate_item(pipeline),
        "outputs": package.description.outputs,
        "max_history": pipeline.data.max_history_len,
        "num_contextual": rule.num_contextual,
        "tokens_per_event": rule.tokens_per_event,
    }
    for table, mapping in mappings(pipeline).items():
        if isinstance(mapping, Vocabulary):
            _write_ids(mapping, output / f"{table}.ids")
    (output / "recipe.json").write_text(json.dumps(recipe, indent=1) + "\n", encoding="utf-8")
    shutil.copyfile(folder / MODEL, output / MODEL)


def _input(name: str, columns: dict[str, FileColumn]) -> dict:
    """Describes one input; the fields are those of `Input` in score.cpp."""
    if name == "steps":
        return {"kind": "steps"}
    if name in LENGTHS:
        return {"kind": "lengths", "side": LENGTHS[name]}
    column = columns.get(name.removesuffix(".counts"))
    if column is None:
        return {"kind": NOT_IN_ROWS[name], "column": name, "side": "history", "required": False}
    place = {"column": column.name, "side": SIDES[column.side], "multi": column.multi_valued}
    place |= {"required": column.required}
    if name.endswith(".counts"):
        return {"kind": "counts", **place}
    if column.kind in (Kind.TIME, Kind.ACTIONS):
        return {"kind": "integers", **place}
    if column.kind is Kind.WATCH_TIME:
        return {"kind": "reals", **place}
    return _values(column) | place


def _values(column: FileColumn) -> dict:
    """Describes how the values of a feature become numbers or table rows."""
    if len(column.readers) > 1:
        raise RecsysError(f"{column.name}: the example reads a column for one feature only")
    feature = column.readers[0].feature
    if feature.HasField("id"):
        if not feature.id.HasField("vocabulary"):
            raise RecsysError(f"{column.name}: the example has no hashed ids")
        return {"kind": "ids", "table": feature.id.table}
    if not feature.HasField("numeric"):
        raise RecsysError(f"{column.name}: the example has no features of other packages")
    numeric = feature.numeric
    fill = {"fill": numeric.fill} if numeric.HasField("fill") else {}
    if numeric.HasField("bucketize"):
        return {"kind": "buckets", "boundaries": list(numeric.bucketize.boundaries), **fill}
    scale = numeric.normalize
    return {"kind": "reals", "mean": scale.mean, "std": scale.std, "log1p": scale.log1p, **fill}


def _write_ids(vocabulary: Vocabulary, path: Path) -> None:
    ids = [str(value) for value in vocabulary.ids.to_pylist()]
    broken = next((value for value in ids if "\n" in value), None)
    if broken is not None:
        raise RecsysError(f"{path.name}: id {broken!r} has a line break")
    rows = vocabulary.layout.row_of(range(len(ids))).tolist()
    path.write_text("".join(f"{row}\t{id}\n" for row, id in zip(rows, ids, strict=True)), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
