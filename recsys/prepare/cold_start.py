"""Makes data to measure how a model recommends items that it was not trained on.

    python -m recsys.prepare cold-start --input data/beauty --output data/beauty-cold --share 0.02

--input is a folder that another tool made for next-item training. A share of its items, drawn at random, is
held out: all their events leave the training and validation rows, and validation rows whose target is held
out are left out. The test rows are those whose target is held out, with whole histories. The vocabulary has
all items, so a model ranks the held-out items among the others, and their counts are 0.
`recsys sid embed` and `recsys sid fit` on this folder know of held-out items their texts only.
held_out.parquet lists the held-out items; `model.generator.decoding.items` ranks these alone.

Memory: one parquet file at a time.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recsys import typed_json
from recsys.data.codes import ITEM
from recsys.errors import ConfigError, DataError
from recsys.prepare import command

HISTORY, TARGET = f"uih_{ITEM}", f"candidate_{ITEM}"
EVENTS = "uih_"
"""Prefix of the columns with a value for each event of a history."""

VOCABULARY = Path("vocabulary") / f"{ITEM}.parquet"
KEPT = ("vocabulary", "items.parquet", "names.parquet")
"""Files and folders that are copied as they are, before the counts change."""


def main(arguments: list[str] | None = None) -> None:
    """Reads a folder, holds items out, and writes another folder."""
    options = _options(arguments)
    source = Path(options.input)
    about = _read_schema(source)
    with command.output_folder(options.output, source=source, overwrite=options.overwrite) as folder:
        for name in KEPT:
            if (source / name).is_dir():
                shutil.copytree(source / name, folder / name)
            elif (source / name).exists():
                shutil.copy(source / name, folder / name)
        held_out = _hold_out(folder / VOCABULARY, options.share, options.seed)
        pq.write_table(pa.table({ITEM: held_out}), folder / "held_out.parquet")
        splits = {}
        for split in ("train", "validation", "test"):
            splits[split] = _write_split(source, folder, about["splits"][split], split, held_out, options)
        about |= {"splits": splits, "made_by": f"{command.PROGRAM} cold-start"}
        about["held_out"] = {"items": len(held_out), "share": options.share, "seed": options.seed}
        (folder / "schema.json").write_text(json.dumps(about, indent=1))
    for split, facts in splits.items():
        print(f"{split}: {facts['rows']} rows, {facts['history_events']} events in histories")
    print(f"{len(held_out):,} items are held out, the targets of the test rows")


def _read_schema(source: Path) -> dict:
    path = source / "schema.json"
    try:
        about = typed_json.parse(path.read_bytes(), dict)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; name a folder that `recsys prepare` made") from None
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path}: damaged ({error}); prepare the data again") from None
    missing = {"train", "validation", "test"} - set(about.get("splits", ()))
    if about.get("task") != "retrieval" or missing:
        raise ConfigError(
            f"{source}: prepared for {about.get('task')}{''.join(f', without {name}' for name in missing)}; "
            "cold-start needs --task retrieval with all splits"
        )
    return about


def _hold_out(path: Path, share: float, seed: int) -> pa.Array:
    """Draws items of the vocabulary, sets their counts to 0, and returns their ids."""
    table = pq.read_table(path).combine_chunks()
    count = round(share * len(table))
    if not count:
        raise ConfigError(f"--share {share}: less than one of the {len(table)} items; give more")
    # The draw depends on ids only, not on the order of the vocabulary, which is that of counts.
    order = pc.sort_indices(table["id"]).to_numpy()
    drawn = order[np.random.default_rng(seed).choice(len(table), count, replace=False)]
    held_out = table["id"].take(pa.array(np.sort(drawn))).combine_chunks()
    if "count" in table.column_names:
        counts = table["count"].to_numpy().copy()
        counts[drawn] = 0
        place = table.column_names.index("count")
        table = table.set_column(place, "count", pa.array(counts))
        table = table.sort_by([("count", "descending")])
    pq.write_table(table, path)
    return held_out


def _write_split(
    source: Path, folder: Path, facts: dict, split: str, held_out: pa.Array, options: argparse.Namespace
) -> dict:
    """Writes the files of a split, and returns its entry of `schema.json`."""
    rows = events = 0
    for name in facts["files"]:
        table = pq.read_table(source / name).combine_chunks()
        if TARGET in table.column_names:
            targets = table[TARGET].combine_chunks()
            if not (pc.list_value_length(targets).to_numpy() == 1).all():
                raise DataError(f"{source / name}: {TARGET} must hold one item in each row")
            is_held_out = pc.is_in(targets.flatten(), held_out)
            table = table.filter(is_held_out if split == "test" else pc.invert(is_held_out))
        if split != "test":
            table = without_events(table, held_out)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, folder / name, row_group_size=options.rows_per_group)
        rows += len(table)
        events += pc.sum(pc.list_value_length(table[HISTORY])).as_py() or 0
    kept = {"files": facts["files"], "rows": rows, "history_events": events}
    return kept | {"candidates": rows if TARGET in table.column_names else 0}


def without_events(table: pa.Table, items: pa.Array) -> pa.Table:
    """Removes the events of some items from all columns of histories.

    Raises:
        DataError: the columns of a row's history have different lengths.
    """
    table = table.combine_chunks()
    history = table[HISTORY].combine_chunks()
    lengths = pc.list_value_length(history).to_numpy()
    keep = pc.invert(pc.is_in(history.flatten(), items))
    before = np.concatenate([[0], np.cumsum(keep.to_numpy(zero_copy_only=False))])
    ends = np.concatenate([[0], np.cumsum(lengths)])
    offsets = pa.array(before[ends].astype(np.int32))
    for place, name in enumerate(table.column_names):
        if not name.startswith(EVENTS):
            continue
        column = table[name].combine_chunks()
        if not np.array_equal(pc.list_value_length(column).to_numpy(), lengths):
            raise DataError(f"{name}: lists are not as long as those of {HISTORY}; prepare the data again")
        lists = pa.ListArray.from_arrays(offsets, column.flatten().filter(keep), type=column.type)
        table = table.set_column(place, table.schema.field(name), lists)
    return table


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number between 0 and 1")
    return share


def _options(arguments: list[str] | None) -> argparse.Namespace:
    flags = command.parser("cold-start", __doc__)
    flags.add_argument("--share", type=_share, default=0.02, help="share of the items that is held out")
    flags.add_argument("--seed", type=int, default=0, help="seed of the draw")
    return flags.parse_args(arguments)
