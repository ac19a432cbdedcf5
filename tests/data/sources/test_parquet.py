"""Parquet files: how they are found, and that a broken one is named instead of read wrong."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.registry import known_implementations

from recsys import protos as pb
from recsys.data.sources import RowGroup, open_source
from recsys.errors import DataError, InstallationError


def source(*paths):
    return open_source(
        pb.Source(parquet=pb.ParquetSource(paths=[str(path) for path in paths])), pb.Pipeline()
    )


def write(path, first: int, count: int = 25):
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"x": list(range(first, first + count)), "y": [[i] * (i % 3) for i in range(count)]})
    pq.write_table(table, path, row_group_size=10, write_page_checksum=True, compression="none")
    return path


@pytest.fixture
def folder(tmp_path):
    for i in range(3):
        write(tmp_path / "train" / f"part-{i}.parquet", 100 * i)
    (tmp_path / "train" / "_SUCCESS").touch()
    (tmp_path / "train" / "notes.txt").write_text("no rows")
    write(tmp_path / "train" / "_temporary" / "part-9.parquet", 900)
    return tmp_path


def names(opened) -> list[str]:
    return [file.path.rsplit("/", 1)[1] for file in opened.files]


def test_folders_globs_and_files(folder):
    assert names(source(folder / "train")) == ["part-0.parquet", "part-1.parquet", "part-2.parquet"]
    assert names(source(folder / "train" / "part-[02].parquet")) == ["part-0.parquet", "part-2.parquet"]
    files = [folder / "train" / f"part-{i}.parquet" for i in (2, 0)]
    assert names(source(*files)) == ["part-2.parquet", "part-0.parquet"]


@pytest.mark.parametrize("odd", ["run [1]", "what?", "a*b", "50%#é"])
def test_a_name_may_have_the_characters_of_a_pattern_in_it(folder, odd):
    path = write(folder / odd / "x[0].parquet", 7)
    for given in (path, path.parent, f"file://{path}"):
        opened = source(given)
        assert names(opened) == ["x[0].parquet"]
        assert opened.read(0, 0, ["x"])["x"].to_pylist() == list(range(7, 17))


def test_fsspec_addresses(folder):
    assert names(source(f"file://{folder}/train")) == ["part-0.parquet", "part-1.parquet", "part-2.parquet"]
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/rows/a.parquet", (folder / "train" / "part-1.parquet").read_bytes())
    opened = source("memory://rows")
    assert [file.path for file in opened.files] == ["memory:///rows/a.parquet"]
    assert opened.read(0, 2, ["x"])["x"].to_pylist() == [120, 121, 122, 123, 124]
    memory.rm("/rows", recursive=True)


def test_row_groups_and_rows(folder):
    opened = source(folder / "train")
    assert opened.num_rows == 75
    assert opened.row_groups[2:5] == [RowGroup(0, 2, 20, 5), RowGroup(1, 0, 0, 10), RowGroup(1, 1, 10, 10)]
    rows = [x for g in opened.row_groups for x in opened.read(g.file, g.number, ["x"])["x"].to_pylist()]
    assert rows == [100 * i + j for i in range(3) for j in range(25)]
    assert opened.read(1, 2, ["y"]).column_names == ["y"]


@pytest.mark.parametrize("pattern", ["none.parquet", "none", "train/*.csv", "empty"])
def test_nothing_there(folder, pattern):
    (folder / "empty").mkdir()
    with pytest.raises(DataError, match=rf"{pattern.replace('*', '.')}: no such file, or no .parquet file"):
        source(folder / pattern)


def test_an_address_of_a_protocol_that_cannot_be_read(monkeypatch):
    absent = {"class": "no_such_package.FileSystem", "err": "needs the moon"}
    monkeypatch.setitem(known_implementations, "nowhere", absent)
    with pytest.raises(DataError, match="s33:// is not a known protocol. Did you mean s3://?"):
        source("s33://bucket/a.parquet")
    with pytest.raises(
        InstallationError, match=r"\(needs the moon\); type: python -m pip install no_such_pac"
    ):
        source("nowhere://bucket/a.parquet")


def test_no_paths():
    with pytest.raises(DataError, match="no .parquet files are given. Set `paths`"):
        source()
    with pytest.raises(DataError, match="a source of rows is empty. Set one of parquet, csv, synthetic"):
        open_source(pb.Source(), pb.Pipeline())


def test_a_file_named_twice(folder):
    with pytest.raises(DataError, match=r"part-1.parquet: `paths` names it twice"):
        source(folder / "train", folder / "train" / "part-1.parquet")


@pytest.mark.parametrize("keep", [0, 3, 100, -1])
def test_a_truncated_file(folder, keep):
    path = folder / "train" / "part-1.parquet"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(
        DataError, match=r"part-1.parquet: not a complete parquet file .*copy it again, or make a new one"
    ):
        source(folder / "train")


def test_a_flipped_bit_in_the_rows(folder):
    path = folder / "train" / "part-0.parquet"
    content = bytearray(path.read_bytes())
    # The plain-coded 64-bit number 3 of the first row group, followed by 4: no dictionary would hold them so.
    pq.write_table(
        pq.read_table(path),
        path,
        row_group_size=10,
        write_page_checksum=True,
        use_dictionary=False,
        compression="none",
    )
    content = bytearray(path.read_bytes())
    place = content.find((3).to_bytes(8, "little") + (4).to_bytes(8, "little"))
    content[place] ^= 1 << 5
    path.write_bytes(bytes(content))
    opened = source(path)
    with pytest.raises(
        DataError, match=r"part-0.parquet, row group 0: cannot be read .*CRC.*The file is damaged"
    ):
        opened.read(0, 0, ["x"])
    assert opened.read(0, 1, ["x"]).num_rows == 10


def test_fingerprint_follows_the_footer_not_the_place(folder, tmp_path):
    first = source(folder / "train" / "part-0.parquet").files[0]
    copy = tmp_path / "copy.parquet"
    copy.write_bytes((folder / "train" / "part-0.parquet").read_bytes())
    assert source(copy).files[0].fingerprint == first.fingerprint
    assert source(write(copy, 1)).files[0].fingerprint != first.fingerprint


def test_schema_is_checked_for_every_file(sample):
    """pyarrow would drop the column of the other file, or cast it, in silence."""
    sample.write(sample.rows(5), "train/a.parquet")
    lacking = sample.table(sample.rows(5)).drop_columns(["age"])
    pq.write_table(lacking, sample.folder / "train" / "b.parquet")
    opened = source(sample.folder / "train")
    with pytest.raises(DataError, match=r"train/b.parquet: no column age"):
        opened.check(sample.pipeline, "train")
    texts = sample.table(sample.rows(5))
    place = texts.schema.get_field_index("user_id")
    pq.write_table(
        texts.set_column(place, "user_id", texts["user_id"].cast(pa.string())),
        sample.folder / "train" / "b.parquet",
    )
    with pytest.raises(
        DataError, match=r"b.parquet: column user_id is string, in \S+/train/a.parquet it is int64"
    ):
        source(sample.folder / "train").check(sample.pipeline, "train")
