"""Broken inputs of `recsys.prepare`: each ends in an error that names the file, and leaves nothing behind."""

import gzip
import io
import random
import shutil
import zipfile
from datetime import time, timedelta
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.prepare import __main__ as command
from tests.prepare.test_kuairand import ORIGINAL as KUAIRAND

EVENTS = 60
COLUMNS = {
    "who": [f"u{number % 6}" for number in range(EVENTS)],
    "sku": [str(number * 7 % 12) for number in range(EVENTS)],
    "ts": [str(1_700_000_000 + 100 * number) for number in range(EVENTS)],
    "hit": [str(number % 2) for number in range(EVENTS)],
    "brand": [f"b{number % 3}" for number in range(EVENTS)],
}
BASE = ["--user-column", "who", "--item-column", "sku", "--time-column", "ts"]
RETRIEVAL = [*BASE, "--task", "retrieval", "--item-feature", "brand"]
RANKING = [*BASE, "--task", "ranking", "--label", "hit=hit", "--item-feature", "brand"]
TEXT = "\n".join(",".join(row) for row in [COLUMNS, *zip(*COLUMNS.values(), strict=True)]).encode() + b"\n"
PACKED = gzip.compress(TEXT, mtime=0)
SEQUENCES = b"".join(b"u%d 1 2 3 4 %d\n" % (user, user) for user in range(6))
TIMES = b"".join(b"u%d 10 20 30 40 50\n" % user for user in range(6))


def flipped(content: bytes, seed: int) -> bytes:
    """Flips one bit."""
    generator = random.Random(seed)
    damaged = bytearray(content)
    damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
    return bytes(damaged)


def mutated(content: bytes, seed: int) -> bytes:
    """Flips bits, cuts, repeats, or puts in bytes that readers stumble over."""
    generator = random.Random(seed)
    first, last = sorted(generator.randrange(len(content) + 1) for _ in range(2))
    odd = generator.choice(
        [b"\r", b"\0", b'"', b"\xe4", b",", b"\n", b"nan", b"-", b"9" * 40, b"x" * 140_000]
    )
    changes = [
        lambda: flipped(content, seed),
        lambda: content[:last],
        lambda: content[:first] + content[last:],
        lambda: content[:last] + content[first:],
        lambda: content[:first] + odd + content[first:],
        lambda: content[:first] + odd + content[min(last, first + len(odd)) :],
    ]
    return generator.choice(changes)()


def run(capsys, folder: Path, *arguments: str | Path) -> tuple[int, str]:
    """Runs a tool and returns its exit code and error text; a failure must leave the folder as it was."""
    before = sorted(folder.iterdir())
    try:
        code = command.main([*map(str, arguments), "--output", str(folder / "made")])
    except SystemExit as stopped:
        code = stopped.code
    said = capsys.readouterr().err
    assert (sorted(folder.iterdir()) == before) == (code != 0)
    assert code == 0 or 0 < len(said) < 1000
    return code, said


def prepare_csv(capsys, path: Path, content: bytes, *flags: str) -> tuple[int, str]:
    path.write_bytes(content)
    return run(capsys, path.parent, "csv", "--input", path, *(flags or RETRIEVAL))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("log.csv", TEXT.replace(b"u1,", b"u\r1,", 1), "log.csv, line 3: 1 values, the header has 5"),
        ("log.csv", TEXT.replace(b"who,", b"who\r,", 1), "log.csv: no column sku, ts, brand; it has who"),
        ("log.csv", b"x" * 140_000 + b"," + TEXT, "log.csv, line 1: field larger than field limit"),
        ("log.csv", TEXT.replace(b"u1,", b"u" * 140_000 + b",,", 1), "log.csv, line 3: field larger than"),
        (
            "log.csv",
            TEXT.replace(b"u1,", b"\xff" * 140_000 + b",", 1),
            "log.csv, line 3: byte 0xff is not UTF",
        ),
        ("log.csv", b"a," * 5000 + b"b\n", "a, a, a and 4961 more"),
        ("log.csv", TEXT.replace(b"1700000100", b"9" * 5000, 1), "line 3: ts is '999"),
        ("log.csv.gz", PACKED[:-5], "log.csv.gz cannot be read: Compressed file ended before"),
        ("log.csv.gz", PACKED[:40] + b"\0" + PACKED[41:], "log.csv.gz cannot be read: "),
        ("log.csv.gz", PACKED + b"junk", "log.csv.gz cannot be read: Not a gzipped file"),
    ],
    ids=["CR", "CR in header", "header", "field", "field not UTF-8", "names", "value", "cut", "flip", "junk"],
)
def test_text_that_is_broken_is_named(tmp_path, capsys, file, content, message):
    code, said = prepare_csv(capsys, tmp_path / file, content)
    assert code == 3 and message in said


def test_text_with_the_line_ends_of_an_old_mac_is_read(tmp_path, capsys):
    assert prepare_csv(capsys, tmp_path / "log.csv", TEXT.replace(b"\n", b"\r")) == (0, "")


@pytest.mark.parametrize(
    ("delimiter", "flag"), [(";", ";"), ("\t", "tab"), ("|", "|")], ids=["semicolon", "tab", "bar"]
)
def test_a_wrong_delimiter_is_hinted_at(tmp_path, capsys, delimiter, flag):
    content = TEXT.replace(b",", delimiter.encode())
    code, said = prepare_csv(capsys, tmp_path / "log.csv", content)
    assert code == 3 and said.endswith(f"It has all of them with --delimiter '{flag}'\n")
    assert prepare_csv(capsys, tmp_path / "log.csv", content, *RETRIEVAL, "--delimiter", flag) == (0, "")


def test_blanks_around_a_name_are_shown(tmp_path, capsys):
    code, said = prepare_csv(capsys, tmp_path / "log.csv", TEXT.replace(b",sku", b", sku"))
    assert code == 3 and "no column sku (did you mean ' sku'?)" in said


def odd_columns() -> dict[str, pa.Array]:
    """Columns of types that a log may not have, or whose values polars cannot take."""
    numbers = range(EVENTS)
    return {
        "time": pa.array([time(1, 2, 3)] * EVENTS),
        "duration": pa.array([timedelta(seconds=number) for number in numbers]),
        "list": pa.array([[number] for number in numbers]),
        "binary": pa.array([b"\xff%d" % number for number in numbers]),
        "UUID": pa.ExtensionArray.from_storage(pa.uuid(), pa.array([bytes(16)] * EVENTS, pa.binary(16))),
        "not UTF-8": pa.Array.from_buffers(
            pa.string(), EVENTS, pa.array([b"\xff%d" % number for number in numbers]).buffers()
        ),
        "moment": pa.array([2**62] * EVENTS, pa.timestamp("ms")),
    }


def as_parquet(path: Path, **changed: pa.Array) -> Path:
    pq.write_table(pa.table({name: pa.array(values) for name, values in COLUMNS.items()} | changed), path)
    return path


@pytest.mark.parametrize("column", ["ts", "hit"])
@pytest.mark.parametrize("kind", odd_columns())
def test_columns_of_other_types_are_named(tmp_path, capsys, kind, column):
    path = as_parquet(tmp_path / "log.parquet", **{column: odd_columns()[kind]})
    code, said = run(capsys, tmp_path, "csv", "--input", path, *RANKING)
    assert code == 3 and str(path) in said
    if kind in ("time", "duration", "list", "binary", "UUID"):
        assert f"column {column} is " in said and "Write the column with such a type" in said


@pytest.mark.parametrize(
    "change",
    [
        {"sku": pa.array([Decimal(number * 7 % 12) for number in range(EVENTS)], pa.decimal256(50, 0))},
        {"ts": pa.array([int(text) for text in COLUMNS["ts"]], pa.timestamp("s", "+05:30"))},
        {"ts": pa.array([int(text) for text in COLUMNS["ts"]], pa.timestamp("s", "Nowhere/X"))},
        {"hit": pa.array([int(text) for text in COLUMNS["hit"]], pa.int8()).cast(pa.bool_())},
        {"brand": pa.array(COLUMNS["brand"]).dictionary_encode()},
    ],
    ids=["decimal256", "zone", "no zone", "boolean", "dictionary"],
)
def test_columns_of_rare_types_give_the_rows_of_their_text(tmp_path, capsys, change):
    as_parquet(tmp_path / "log.parquet", **change)
    (tmp_path / "log.csv").write_bytes(TEXT)
    for name in ("log.parquet", "log.csv"):
        assert command.main(
            ["csv", "--input", str(tmp_path / name), "--output", str(tmp_path / name[4:]), *RANKING]
        ) == 0, capsys.readouterr().err  # fmt: skip
    for split in ("train", "validation", "test"):
        tables = [pq.read_table(tmp_path / name / split) for name in ("parquet", "csv")]
        assert tables[0] == tables[1]


@pytest.mark.parametrize("flag", ["--max-history", "--max-candidates", "--session-gap", "--rows-per-group"])
@pytest.mark.parametrize("value", ["9223372036854775808", "9" * 5000, "0", "-1", "1e3", "²"])
def test_numbers_beyond_what_a_flag_takes_are_usage_errors(tmp_path, capsys, flag, value):
    code, said = prepare_csv(capsys, tmp_path / "log.csv", TEXT, *RANKING, flag, value)
    assert code == 2 and flag in said and ("give at most 1000000000000" in said or "above 0" in said)


@pytest.mark.parametrize("name", ["../../x", "a/b", 'q"x', "é", "label_hit", "order"])
def test_columns_that_cannot_be_features_are_refused(tmp_path, capsys, name):
    header = TEXT.replace(b"brand", b'"' + name.replace('"', '""').encode() + b'"', 1)
    flags = [*BASE, "--task", "ranking", "--label", "hit=hit", "--item-feature", name]
    code, said = prepare_csv(capsys, tmp_path / "log.csv", header, *flags)
    assert code == 2 and repr(name) in said


@pytest.mark.parametrize("name", ["bucket", "first", "count", "id", "index"])
@pytest.mark.parametrize("task", [RETRIEVAL, RANKING], ids=["retrieval", "ranking"])
def test_a_feature_may_have_any_other_name(tmp_path, capsys, name, task):
    flags = [name if flag == "brand" else flag for flag in task]
    content = TEXT.replace(b"brand", name.encode(), 1)
    assert prepare_csv(capsys, tmp_path / "log.csv", content, *flags) == (0, "")


def test_the_output_cannot_replace_the_input(tmp_path, capsys):
    (tmp_path / "log").mkdir()
    source = tmp_path / "log" / "a.csv"
    source.write_bytes(TEXT)
    for given in (source, source.parent):
        flags = ["--input", str(given), "--output", str(tmp_path / "log"), "--overwrite"]
        assert command.main(["csv", *flags, *RETRIEVAL]) == 2
        assert "holds the --input" in capsys.readouterr().err and source.read_bytes() == TEXT


@pytest.mark.parametrize(
    ("items", "times", "message"),
    [
        (SEQUENCES.replace(b"u1", b"\xe4"), None, "log.txt, line 2: byte 0xe4 is not UTF-8"),
        (SEQUENCES, TIMES.replace(b"u1", b"\xe4"), "times.txt, line 2: byte 0xe4 is not UTF-8"),
        (gzip.compress(SEQUENCES), None, "log.txt, line 1: byte 0x8b is not UTF-8"),
        (SEQUENCES.replace(b"u1", b"u" * 200_000), TIMES, "times.txt, line 2: user u1 with 5 events"),
    ],
    ids=["items", "times", "packed", "long"],
)
def test_sequences_that_are_broken_are_named(tmp_path, capsys, items, times, message):
    (tmp_path / "log.txt").write_bytes(items)
    (tmp_path / "times.txt").write_bytes(times or b"")
    flags = ["--times", tmp_path / "times.txt"] if times else []
    code, said = run(capsys, tmp_path, "sequences", "--input", tmp_path / "log.txt", *flags)
    assert code == 3 and message in said


@pytest.mark.parametrize("cut", [5, -5], ids=["head", "tail"])
def test_packed_sequences_that_are_cut_off_are_named(tmp_path, capsys, cut):
    (tmp_path / "log.txt.gz").write_bytes(gzip.compress(SEQUENCES)[:cut])
    code, said = run(capsys, tmp_path, "sequences", "--input", tmp_path / "log.txt.gz")
    assert code == 3 and "log.txt.gz cannot be read: " in said


def release() -> bytes:
    """A small MovieLens release as a zip file."""
    ratings = [f"{user},{movie},4,{1000 + movie}" for user in range(1, 7) for movie in range(1, 6)]
    movies = [f"{movie},Movie {movie} (1995),Drama" for movie in range(1, 6)]
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, head, lines in (
            ("ratings.csv", "userId,movieId,rating,timestamp", ratings),
            ("movies.csv", "movieId,title,genres", movies),
        ):
            archive.writestr(zipfile.ZipInfo(f"ml/{name}"), "\n".join([head, *lines, ""]))
    return written.getvalue()


RELEASE = release()
METHOD = RELEASE.replace(b"PK\3\4\x14\0\0\0\0", b"PK\3\4\x14\0\0\0\x63").replace(
    b"PK\1\2\x14\3\x14\0\0\0\0", b"PK\1\2\x14\3\x14\0\0\0\x63"
)


@pytest.mark.parametrize(
    "content",
    [RELEASE[: len(RELEASE) // 2], RELEASE[100:], METHOD, *(flipped(RELEASE, seed) for seed in range(12))],
)
def test_a_zip_file_that_is_broken_is_named(tmp_path, capsys, content):
    path = tmp_path / "ml.zip"
    path.write_bytes(content)
    code, said = run(capsys, tmp_path, "movielens", "--input", path)
    assert code in (0, 3) and (code == 0 or str(path) in said)


@pytest.mark.parametrize("tag", ["x", "9" * 30, '"1,x"', '"1,"'])
def test_a_tag_that_is_no_number_is_named(tmp_path, capsys, tag):
    for path in KUAIRAND.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    videos = tmp_path / "video_features_basic_pure.csv"
    header, row, *rest = videos.read_text().splitlines()
    place = header.split(",").index("tag")
    changed = [tag if at == place else value for at, value in enumerate(row.split(","))]
    videos.write_text("\n".join([header, ",".join(changed), *rest]))
    code, said = run(capsys, tmp_path, "kuairand", "--input", tmp_path)
    assert code == 3 and f"tag of video {row.split(',')[0]} is " in said and str(videos) in said


@pytest.mark.parametrize("seed", range(6))
def test_a_damaged_parquet_file_is_named_or_read(tmp_path, capsys, seed):
    path = as_parquet(tmp_path / "log.parquet")
    path.write_bytes(flipped(path.read_bytes(), seed))
    code, said = run(capsys, tmp_path, "csv", "--input", path, *RANKING)
    assert code in (0, 3) and (code == 0 or str(path) in said)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["csv", "gz", "parquet", "zip", "sequences"])
def test_no_damage_gives_a_traceback(tmp_path, capsys, form):
    as_parquet(tmp_path / "clean.parquet")
    clean = {
        "csv": TEXT,
        "gz": PACKED,
        "parquet": (tmp_path / "clean.parquet").read_bytes(),
        "zip": RELEASE,
        "sequences": SEQUENCES,
    }[form]
    (tmp_path / "clean.parquet").unlink()
    names = {"csv": "log.csv", "gz": "log.csv.gz", "parquet": "log.parquet", "zip": "ml.zip"}
    path = tmp_path / names.get(form, "log.txt")
    tool = {"zip": ["movielens"], "sequences": ["sequences"]}.get(form, ["csv", *RANKING])
    for seed in range(200):
        content = mutated(clean, seed)
        path.write_bytes(content)
        code, said = run(capsys, tmp_path, *tool, "--input", path)
        assert code in (0, 2, 3) and (code == 0 or str(path) in said), (seed, said)
        if code == 0:
            shutil.rmtree(tmp_path / "made")
