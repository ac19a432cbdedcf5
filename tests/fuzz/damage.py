"""Damages one file or folder in a way that a seed chooses: its bytes, its place in the folder, or what its
format allows.

`damage(root, parts, generator)` returns the damaged path and a description, which with the seed is enough to
repeat a case.
"""

import copy
import json
import os
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from recsys import files

DEEP = "@deep@"
"""A text in JSON that stands for lists in 50,000 lists."""

WRONG = [
    None, True, False, 0, -1, 3, 2**31, 2**63, 10**40, 1.5, -1e308, 1e-320, float("inf"), float("nan"),
    "", "x", "\ud800", "a\0b", "../../x", "x" * 100_000, "9" * 5000, "²",
    [], [[]], [None], {}, {"a": 1}, {"": {"": []}}, DEEP,
]  # fmt: skip
"""Values, one of which is wrong at nearly any place of a JSON file."""

NUMBERS = ["0", "-1", "1e999", "nan", "2147483647", "9" * 30, "1e-320", "0x10", "''", "²", "1_0"]
"""Texts in place of a number of a config."""


_UNREAD = {"starter.config", "log.txt", ".lock"}
"""Files that no command reads, beside those of TensorBoard."""


class Damaged(NamedTuple):
    """A path that was damaged, and how."""

    path: Path
    how: str


def damage(root: Path, parts: list[str], generator: random.Random) -> Damaged:
    """Damages one file below `root`, in one of the folders `parts`.

    Half of the time the manifest of its folder is written anew, so that its reader comes to the damage.
    """
    path = _choose(root, parts, generator)
    kinds = [*_BYTES, *_ENTRIES]
    # A format's own damage is rarer than bytes, and finds more.
    for format_name, ways in _FORMATS.items():
        if _format(path) == format_name:
            kinds = [*kinds, *(3 * ways)]
    while True:
        way = generator.choice(kinds)
        how = way(path, generator, root)
        if how:
            break
    how = f"{way.__name__.strip('_')}{': ' + how if how != 'done' else ''}"
    folder = next((x for x in path.parents if (x / files.MANIFEST).is_file()), None)
    if folder is not None and path.name != files.MANIFEST and generator.random() < 0.7:
        try:
            files.write_manifest(folder)
            how += ", manifest fits"
        except OSError:
            pass
    return Damaged(path, how)


def _choose(root: Path, parts: list[str], generator: random.Random) -> Path:
    """Chooses a folder, then a kind of file, so that many files of a kind count as one."""
    kinds: dict[tuple[str, str], list[Path]] = {}
    for part in parts:
        whole = root / part
        for path in [whole] if whole.is_file() else sorted(x for x in whole.rglob("*") if x.is_file()):
            if "tensorboard" in path.parts or path.name in _UNREAD:
                continue
            kinds.setdefault((str(path.parent), _kind(path)), []).append(path)
    return generator.choice(kinds[generator.choice(sorted(kinds))])


def _kind(path: Path) -> str:
    return path.suffix if path.suffix in (".parquet", ".distcp") or "tfevents" in path.name else path.name


def _format(path: Path) -> str:
    return {".json": "json", ".jsonl": "jsonl", ".resolved": "config", ".config": "config"}.get(
        path.suffix, path.suffix.removeprefix(".")
    )


# Bytes.


def _write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return "done"


def empty(path: Path, generator: random.Random, root: Path) -> str:
    return _write(path, b"")


def cut(path: Path, generator: random.Random, root: Path) -> str:
    content = path.read_bytes()
    keep = generator.choice(
        [generator.randrange(len(content) + 1), max(0, len(content) - 1 - generator.randrange(9))]
    )
    _write(path, content[:keep])
    return f"to {keep} bytes"


def flip(path: Path, generator: random.Random, root: Path) -> str:
    content = bytearray(path.read_bytes())
    if not content:
        return ""
    count = generator.choice([1, 1, 3, 30])
    ends = [
        range(len(content)),
        range(min(64, len(content))),
        range(max(0, len(content) - 2000), len(content)),
    ]
    for _ in range(count):
        content[generator.choice(generator.choice(ends))] ^= 1 << generator.randrange(8)
    _write(path, bytes(content))
    return f"{count} bits"


def insert(path: Path, generator: random.Random, root: Path) -> str:
    content = path.read_bytes()
    odd = generator.choice(
        [
            b"\0",
            b"\xff\xfe",
            b"\xed\xa0\x80",
            b"\r",
            b"\n",
            b'"',
            b"{",
            b"[" * 50_000,
            b"9" * 5000,
            b"x" * 1_000_000,
        ]
    )
    place = generator.randrange(len(content) + 1)
    _write(path, content[:place] + odd + content[place:])
    return f"{odd[:8]!r} x {len(odd)} at {place}"


def zeros(path: Path, generator: random.Random, root: Path) -> str:
    content = path.read_bytes()
    first, last = sorted(generator.randrange(len(content) + 1) for _ in range(2))
    _write(path, content[:first] + bytes(last - first) + content[last:])
    return f"{first} to {last}"


def noise(path: Path, generator: random.Random, root: Path) -> str:
    return _write(path, generator.randbytes(generator.choice([1, 8, 100, 5000])))


def appended(path: Path, generator: random.Random, root: Path) -> str:
    return _write(
        path, path.read_bytes() + generator.choice([b"\n", b"\0" * 100, b"{}", b"x", path.read_bytes()])
    )


def utf16(path: Path, generator: random.Random, root: Path) -> str:
    return _write(path, path.read_bytes().decode("latin-1").encode("utf-16"))


def byte_order_mark(path: Path, generator: random.Random, root: Path) -> str:
    return _write(path, b"\xef\xbb\xbf" + path.read_bytes())


def swapped(path: Path, generator: random.Random, root: Path) -> str:
    """Puts another file here: of the same kind if there is one."""
    others = [x for x in sorted(root.rglob("*")) if x.is_file() and x != path]
    alike = [x for x in others if x.suffix == path.suffix]
    chosen = generator.choice(alike if alike and generator.random() < 0.7 else others)
    _write(path, chosen.read_bytes())
    return f"is {chosen.relative_to(root)}"


# Entries of folders.


def deleted(path: Path, generator: random.Random, root: Path) -> str:
    path.unlink()
    return "done"


def folder(path: Path, generator: random.Random, root: Path) -> str:
    path.unlink()
    path.mkdir()
    return "done"


def broken_link(path: Path, generator: random.Random, root: Path) -> str:
    path.unlink()
    path.symlink_to("nowhere")
    return "done"


def looping_link(path: Path, generator: random.Random, root: Path) -> str:
    path.unlink()
    path.symlink_to(path.name)
    return "done"


def moved_behind_link(path: Path, generator: random.Random, root: Path) -> str:
    """Is no damage: files may lie elsewhere."""
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")
    return "done"


def forbidden(path: Path, generator: random.Random, root: Path) -> str:
    path.chmod(0)
    return "done"


def forbidden_folder(path: Path, generator: random.Random, root: Path) -> str:
    if path.parent == root:
        return ""
    path.parent.chmod(generator.choice([0, 0o500]))
    return "done"


def folder_is_file(path: Path, generator: random.Random, root: Path) -> str:
    if path.parent == root:
        return ""
    shutil.rmtree(path.parent)
    path.parent.write_bytes(b"x")
    return "done"


def folder_is_gone(path: Path, generator: random.Random, root: Path) -> str:
    if path.parent == root:
        return ""
    shutil.rmtree(path.parent)
    return "done"


def odd_neighbour(path: Path, generator: random.Random, root: Path) -> str:
    names = [
        "step-99999999", "step-²", "step-1", f"step-{'9' * 30}", ".step-00000001.old",
        "part-00000-00009.parquet", os.fsdecode(b"odd-\xff"), "x.parquet",
    ]  # fmt: skip
    name = generator.choice(names)
    place = generator.choice([path.parent, *[x for x in path.parent.parents if root in x.parents]]) / name
    if place.exists():
        return ""
    if generator.random() < 0.5:
        place.mkdir()
    else:
        place.write_bytes(b"x")
    return f"{place.relative_to(root)!s}".encode(errors="backslashreplace").decode()


# JSON.


def places(value: Any, place: tuple = ()) -> list[tuple]:
    """Every place of a JSON value; of a list its first two entries."""
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value[:2] if isinstance(value, list) else ())
    )
    return [place, *(inner for name, item in entries for inner in places(item, (*place, name)))]


def changed_json(text: str, generator: random.Random) -> tuple[str, str]:
    """Changes a value of a JSON text, or takes out, adds or doubles an entry."""
    value = json.loads(text)
    place = generator.choice(places(value))
    new, how = (
        generator.choice(WRONG),
        generator.choice(["change", "change", "change", "delete", "add", "double"]),
    )
    if not place:
        return _json_text(new), f"all of it is {str(new)[:20]!r}"
    inside = value = copy.deepcopy(value)
    for name in place[:-1]:
        inside = inside[name]
    last = place[-1]
    if how == "delete":
        del inside[last]
    elif how == "change" or isinstance(inside, list):
        inside[last] = new
    else:
        inside[f"{last}@double@" if how == "double" else "more"] = new
    at = ".".join(map(str, place))
    return _json_text(value), f"{how} {at[:60]}" + ("" if how == "delete" else f" {str(new)[:20]!r}")


def _json_text(value: Any) -> str:
    text = json.dumps(value, indent=1)
    return text.replace(f'"{DEEP}"', "[" * 50_000 + "]" * 50_000).replace("@double@", "")


def json_value(path: Path, generator: random.Random, root: Path) -> str:
    try:
        text, how = changed_json(path.read_text(), generator)
    except ValueError:
        return ""
    path.write_text(text)
    return how


def jsonl_value(path: Path, generator: random.Random, root: Path) -> str:
    lines = path.read_text().splitlines()
    if not lines:
        return ""
    number = generator.randrange(len(lines))
    text, how = changed_json(lines[number], generator)
    lines[number] = text.replace("\n", "")
    path.write_text("\n".join(lines) + generator.choice(["\n", ""]))
    return f"line {number + 1}: {how}"


def jsonl_line(path: Path, generator: random.Random, root: Path) -> str:
    lines = path.read_bytes().splitlines(keepends=True)
    if not lines:
        return ""
    number = generator.randrange(len(lines))
    odd = generator.choice(
        [
            b"\n",
            b"\0\n",
            b"{\n",
            b"[]\n",
            b"x" * 100_000 + b"\n",
            lines[number][: len(lines[number]) // 2] + b"\n",
            lines[number],
        ]
    )
    lines.insert(number, odd)
    path.write_bytes(b"".join(lines))
    return f"{odd[:10]!r} before line {number + 1}"


# Configs.


def config_line(path: Path, generator: random.Random, root: Path) -> str:
    lines = path.read_text().splitlines()
    number = generator.randrange(len(lines))
    line = lines[number]
    name, colon, _ = line.partition(":")
    values = [
        *NUMBERS, "{" * 3000, '"' + "x" * 100_000 + '"', '"a\\0b"', '"\\377"', '""', '"/nowhere/x"', '"\0"',
    ]  # fmt: skip
    odd = [line + line, "", "}", "{", "\0", *(f"{name}: {value}" for value in values)]
    lines[number] = generator.choice(odd)
    path.write_text("\n".join(lines) + "\n")
    return f"line {number + 1} {line.strip()!r} is {lines[number].strip()[:40]!r}"


# Parquet.


def _nested(values: pa.ChunkedArray) -> pa.Array:
    array = values.combine_chunks()
    return pa.ListArray.from_arrays(pa.array(range(len(array) + 1), pa.int32()), array)


def _nulled(values: pa.ChunkedArray) -> pa.Array:
    return pa.array(
        [None if row % 3 == 0 else value for row, value in enumerate(values.to_pylist())], values.type
    )


def _constant(value: Any, kind: pa.DataType) -> Callable[[pa.ChunkedArray], pa.Array]:
    def fill(values: pa.ChunkedArray) -> pa.Array:
        inner, depth = values.type, 0
        while pa.types.is_list(inner) or pa.types.is_large_list(inner):
            inner, depth = inner.value_type, depth + 1

        def put(item: Any, left: int) -> Any:
            return value if left == 0 or item is None else [put(x, left - 1) for x in item]

        whole = kind
        for _ in range(depth):
            whole = pa.list_(whole)
        return pa.array([put(item, depth) for item in values.to_pylist()], whole)

    return fill


def _once(value: Any) -> Callable[[pa.ChunkedArray], pa.Array]:
    """Puts a value into the first place that has one."""

    def put(values: pa.ChunkedArray) -> pa.Array:
        items = values.to_pylist()
        for row in range(len(items)):
            inside, at = items, row
            while isinstance(inside[at], list) and inside[at]:
                inside, at = inside[at], 0
            if inside[at] not in (None, []):
                inside[at] = value
                break
        return pa.array(items, values.type)

    return put


_COLUMNS: dict[str, Callable[[pa.ChunkedArray], pa.Array]] = {
    "in lists": _nested,
    "with nulls": _nulled,
    "all null": lambda values: pa.nulls(len(values), values.type),
    "of type null": lambda values: pa.nulls(len(values)),
    "text": _constant("x", pa.string()),
    "bytes": _constant(b"\xff", pa.binary()),
    "text of a dictionary": lambda values: (
        _constant("x", pa.string())(values).dictionary_encode()
        if not pa.types.is_nested(values.type)
        else _nulled(values)
    ),
    "decimal": _constant(Decimal("1.5"), pa.decimal128(20, 3)),
    "256-bit decimal": _constant(Decimal(1), pa.decimal256(60, 3)),
    "times": _constant(1, pa.timestamp("ns", "UTC")),
    "time of day": _constant(1, pa.time64("us")),
    "durations": _constant(1, pa.duration("s")),
    "truth": _constant(True, pa.bool_()),
    "half floats": _constant(1.0, pa.float16()),
    "uint64": _constant(2**64 - 1, pa.uint64()),
    "int8": _constant(-7, pa.int8()),
    "one value": _constant(1, pa.int64()),
    "nan": _constant(float("nan"), pa.float64()),
    "infinite": _constant(float("-inf"), pa.float32()),
    "structs": _constant({"a": 1}, pa.struct([("a", pa.int64())])),
    "huge number": _once(2**62),
    "smallest number": _once(-(2**63)),
    "long text": _once("long" * 5_000_000),
    "a null inside": _once(None),
    "reversed": lambda values: values.take(pa.array(range(len(values) - 1, -1, -1))).combine_chunks(),
}


def parquet_column(path: Path, generator: random.Random, root: Path) -> str:
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError):
        return ""
    name, how = generator.choice(table.column_names), generator.choice(list(_COLUMNS))
    place = table.schema.get_field_index(name)
    try:
        pq.write_table(table.set_column(place, name, _COLUMNS[how](table[name])), path, row_group_size=50)
    except (pa.ArrowException, TypeError, OverflowError):
        return ""
    return f"column {name} is {how}"


def parquet_table(path: Path, generator: random.Random, root: Path) -> str:
    table = pq.read_table(path)
    name = generator.choice(table.column_names)
    place, half, large = table.schema.get_field_index(name), len(table) // 2, _large(table[name].type)
    changes = {
        f"without column {name}": lambda: table.drop_columns([name]),
        f"column {name} has another name": lambda: table.rename_columns({name: f"{name}s"}),
        f"column {name} twice": lambda: table.append_column(name, table[name]),
        "no rows": lambda: table.slice(0, 0),
        "one row": lambda: table.slice(0, 1),
        "without the last row": lambda: table.slice(0, max(0, len(table) - 1)),
        "rows twice": lambda: pa.concat_tables([table, table]),
        "no columns": lambda: table.select([]),
        f"column {name} first": lambda: table.select([name, *(x for x in table.column_names if x != name)]),
        f"column {name} large": lambda: table.set_column(place, name, table[name].cast(large)),
        "other rows in front": lambda: pa.concat_tables([table.slice(half), table.slice(0, half)]),
    }
    how = generator.choice(list(changes))
    pq.write_table(changes[how](), path, row_group_size=generator.choice([1000, 7]))
    return how


def _large(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_list(kind):
        return pa.large_list(_large(kind.value_type))
    return pa.large_string() if pa.types.is_string(kind) else kind


# Tensors and programs.


def tensors_header(path: Path, generator: random.Random, root: Path) -> str:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    text, how = changed_json(content[8 : 8 + length].decode(), generator)
    header = text.encode(errors="replace")
    if generator.random() < 0.3:
        claimed = generator.choice([2**63, 0, len(header) - 1, 10**9])
        path.write_bytes(struct.pack("<Q", claimed) + header + content[8 + length :])
        return f"{how}, and a length of {claimed}"
    path.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])
    return how


def zip_entries(path: Path, generator: random.Random, root: Path) -> str:
    with zipfile.ZipFile(path) as opened:
        entries = {info.filename: opened.read(info) for info in opened.infolist()}
    name = generator.choice(sorted(entries))
    how = generator.choice(["without", "empty", "cut", "bomb", "outside"])
    if how == "without":
        del entries[name]
    elif how == "outside":
        entries["../../outside"] = b"x"
    else:
        entries[name] = {"empty": b"", "cut": entries[name][: len(entries[name]) // 2], "bomb": b""}[how]
    with zipfile.ZipFile(path, "w") as written:
        for entry, content in entries.items():
            written.writestr(entry, content)
        if how == "bomb":
            with written.open(zipfile.ZipInfo(name + ".more"), "w", force_zip64=True) as bomb:
                pass
            info = zipfile.ZipInfo(name + ".bomb")
            info.compress_type = zipfile.ZIP_DEFLATED
            with written.open(info, "w", force_zip64=True) as bomb:
                for _ in range(2000):
                    bomb.write(bytes(1 << 20))
    return f"{how} {name}"


_BYTES = [empty, cut, flip, flip, insert, zeros, noise, appended, utf16, byte_order_mark, swapped]
_ENTRIES = [
    deleted, folder, broken_link, looping_link, moved_behind_link, forbidden, forbidden_folder,
    folder_is_file, folder_is_gone, odd_neighbour,
]  # fmt: skip
_FORMATS = {
    "json": [json_value, json_value, json_value],
    "jsonl": [jsonl_value, jsonl_line],
    "config": [config_line, config_line],
    "parquet": [parquet_column, parquet_column, parquet_table],
    "safetensors": [tensors_header],
    "pt2": [zip_entries],
}
