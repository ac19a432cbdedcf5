"""Bundles: extra digits, statistics by formula, damage, new items, the report."""

import json
import math
import re
import shutil
from collections import Counter

import numpy as np
import polars as pl
import pytest
import torch

from recsys.errors import ConfigError, DataError
from recsys.sid import bundle, collisions, embeddings, page, statistics
from recsys.sid.__main__ import main
from recsys.sid.quantizers import RqKmeans


def test_extra_digits_count_the_items_of_a_code_in_the_order_of_their_ids():
    codes = np.array([[1, 2], [0, 0], [1, 2], [1, 2], [0, 0], [3, 3]])
    assert collisions.extra_digits(codes).tolist() == [0, 0, 1, 2, 1, 0]


def test_more_items_than_digits_are_an_error_that_says_what_to_raise():
    assert collisions.extra_digits(np.zeros((256, 2), np.int64)).tolist() == list(range(256))
    with pytest.raises(ConfigError, match="257 items share one code.*raise --levels or --size"):
        collisions.extra_digits(np.zeros((257, 2), np.int64))


def test_items_that_no_source_knows_share_the_first_code_and_are_counted_below():
    codes, vectors = np.full((302, 3), 7), np.ones((302, 2))
    vectors[1:301] = 0
    spread = collisions.spread_unknown(codes, vectors, size=16)
    assert (spread[[0, 301]] == 7).all()
    expected = [[7, number // 16 % 16, number % 16] for number in range(300)]
    assert spread[1:301].tolist() == expected
    # 300 items on 256 codes: the extra digit tells the rest apart.
    digits = collisions.extra_digits(spread)
    assert len(set(map(tuple, np.column_stack([spread, digits]).tolist()))) == 302
    later = collisions.spread_unknown(codes[:2], np.zeros((2, 2)), size=16, first=300)
    assert later.tolist() == [[7, 2, 12], [7, 2, 13]]


def test_new_items_get_digits_that_nobody_has():
    old, digits = np.array([[1], [1], [2]]), np.array([0, 2, 1])
    actual = collisions.free_digits(np.array([[1], [2], [1], [3], [2]]), old, digits)
    whole = list(zip([1, 1, 2, 1, 2, 1, 3, 2], [*digits.tolist(), *actual.tolist()], strict=True))
    assert len(set(whole)) == len(whole)
    assert actual[3] == 0


def test_statistics_are_those_of_the_formulas():
    generator = np.random.default_rng(0)
    codes = generator.integers(0, 5, (60, 2)) % np.array([4, 5])
    digits = collisions.extra_digits(codes)
    actual = statistics.code_statistics(codes, digits, 5)
    counts = Counter(map(tuple, codes.tolist()))
    assert actual.distinct == len(counts) / 60
    assert actual.alone == sum(counts[tuple(code)] == 1 for code in codes.tolist()) / 60
    assert actual.shared == sum(count > 1 for count in counts.values()) and actual.largest == max(
        counts.values()
    )
    assert actual.unique == 1
    for place, level in enumerate(actual.levels):
        share = [count / 60 for count in Counter(codes[:, place].tolist()).values()]
        assert level.entropy == pytest.approx(-sum(p * math.log2(p) for p in share))
        assert level.perplexity == pytest.approx(math.exp(-sum(p * math.log(p) for p in share)))
    assert actual.levels[0].dead >= 1


def test_what_codes_keep_is_what_loops_find():
    vectors = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    fitted = RqKmeans.fit(vectors, levels=2, size=4, balanced=False, seed=0)
    actual = statistics.kept(vectors, fitted.codes, fitted.quantizer, ordered=True)
    codes, decoded = fitted.codes.numpy(), fitted.quantizer.decode(fitted.codes).double().numpy()
    exact = vectors.double().numpy()
    assert actual.error == pytest.approx(((decoded - exact) ** 2).sum() / (exact**2).sum(), rel=1e-5)

    def near(matrix: np.ndarray, row: int) -> list[int]:
        cosine = matrix @ matrix[row] / np.linalg.norm(matrix, axis=1)
        return [neighbor for neighbor in np.argsort(-cosine) if neighbor != row][:10]

    first = [codes[row, 0] == codes[neighbor, 0] for row in range(40) for neighbor in near(exact, row)]
    both = [(codes[row] == codes[neighbor]).all() for row in range(40) for neighbor in near(exact, row)]
    assert actual.neighbours == pytest.approx([np.mean(first), np.mean(both)])
    pairs = [codes[i, 0] == codes[j, 0] for i in range(40) for j in range(40) if i != j]
    assert actual.chance[0] == pytest.approx(np.mean(pairs))


@pytest.fixture
def folders(tmp_path):
    """Vectors of 60 items in the folder `vectors`, of 20 more items in `more`, both by the same transform."""
    generator = np.random.default_rng(0)
    values = generator.normal(size=(80, 12))
    for name, rows in (("data", 60), ("later", 80)):
        folder = tmp_path / name / "vocabulary"
        folder.mkdir(parents=True)
        # Old and new ids mix in their order.
        ids = [f"i{place * 37 % 80:02d}" for place in range(rows)]
        pl.DataFrame({"id": ids, "count": 1}).write_parquet(folder / "item_id.parquet")
        frame = pl.DataFrame({"item_id": ids, "vector": values[:rows].tolist()})
        frame.write_parquet(tmp_path / f"{name}.parquet")
    flags = ["--source", "file", "--vectors", str(tmp_path / "data.parquet")]
    run("embed", "--data", tmp_path / "data", "--output", tmp_path / "vectors", *flags)
    fit = ["--levels", "2", "--size", "6"]
    run("fit", "--embeddings", tmp_path / "vectors", "--output", tmp_path / "bundle", *fit)
    like = ["--like", tmp_path / "bundle", "--vectors", tmp_path / "later.parquet"]
    run("embed", "--data", tmp_path / "later", "--output", tmp_path / "more", *like)
    return tmp_path


def run(*arguments) -> None:
    assert main([str(argument) for argument in arguments]) == 0


def test_appending_leaves_old_codes_and_gives_every_item_one_of_its_own(folders):
    run(
        "append",
        "--bundle",
        folders / "bundle",
        "--embeddings",
        folders / "more",
        "--output",
        folders / "next",
    )
    old, new = bundle.read_bundle(folders / "bundle"), bundle.read_bundle(folders / "next")
    # In place, too: the new bundle takes the place of the old one when it is whole.
    copy = folders / "copy"
    shutil.copytree(folders / "bundle", copy)
    run("append", "--bundle", copy, "--embeddings", folders / "more", "--output", copy, "--overwrite")
    assert (copy / "codes.parquet").read_bytes() == (folders / "next/codes.parquet").read_bytes()
    assert (old.about.version, new.about.version) == (1, 2) and len(new.ids) == 80
    assert new.ids[:60].to_list() == old.ids.to_list()
    assert np.array_equal(new.codes[:60], old.codes) and np.array_equal(new.digits[:60], old.digits)
    whole = np.column_stack([new.codes, new.digits])
    assert len(np.unique(whole, axis=0)) == 80 and new.about.codes.unique == 1
    # By a chain of its own: the nearest centroid of what is left, a level at a time.
    more = embeddings.read_embeddings(folders / "more")
    vectors = dict(zip(more.ids, more.vectors, strict=True))
    for item, codes in zip(new.ids[60:], new.codes[60:], strict=True):
        rest = vectors[item].astype(np.float64)
        for level, code in zip(new.quantizer.centroids.numpy(), codes, strict=True):
            assert ((level - rest) ** 2).sum(1).argmin() == code
            rest = rest - level[code]
    assert (folders / "bundle/quantizer.safetensors").read_bytes() == (
        folders / "next/quantizer.safetensors"
    ).read_bytes()


def test_appending_vectors_of_another_transform_or_nothing_new_is_refused(folders, capsys):
    out = ["--output", folders / "next"]
    flags = ["append", "--bundle", folders / "bundle", "--embeddings"]
    assert main([str(word) for word in [*flags, folders / "vectors", *out]]) == 3
    assert "no item is new" in capsys.readouterr().err
    source = ["--source", "file", "--vectors", folders / "later.parquet"]
    run("embed", "--data", folders / "later", "--output", folders / "other", *source)
    assert main([str(word) for word in [*flags, folders / "other", *out]]) == 2
    assert "--like BUNDLE" in capsys.readouterr().err
    assert not (folders / "next").exists()


@pytest.mark.parametrize(
    "name", ["codes.parquet", "quantizer.safetensors", "bundle.json", "transform/transform.json"]
)
def test_a_changed_file_is_refused_by_name(folders, name):
    path = folders / "bundle" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=re.escape(f"{path}: its bytes differ from the manifest")):
        bundle.read_bundle(folders / "bundle")


def test_missing_and_added_files_are_refused(folders):
    added = folders / "bundle/notes.txt"
    added.write_text("x")
    with pytest.raises(DataError, match="notes.txt: not in the manifest"):
        bundle.read_bundle(folders / "bundle")
    added.unlink()
    (folders / "bundle/codes.parquet").unlink()
    with pytest.raises(DataError, match="codes.parquet: missing"):
        bundle.read_bundle(folders / "bundle")
    with pytest.raises(DataError, match="no such folder"):
        bundle.read_bundle(folders / "nowhere")


def test_the_same_commands_make_the_same_bytes_and_a_full_code_leaves_nothing(folders, capsys):
    fit = [
        "fit",
        "--embeddings",
        folders / "vectors",
        "--levels",
        "2",
        "--size",
        "6",
        "--output",
        folders / "again",
    ]
    run(*fit)
    for path in sorted((folders / "bundle").rglob("*.*")):
        assert path.read_bytes() == (folders / "again" / path.relative_to(folders / "bundle")).read_bytes()
    assert main([str(word) for word in fit]) == 2, "the folder exists"
    assert "--overwrite" in capsys.readouterr().err
    assert main([str(word) for word in [*fit[:-3], "61", "--output", folders / "large"]]) == 2
    assert "--size 61: more codes than the 60 items" in capsys.readouterr().err
    assert not (folders / "large").exists()


def test_the_report_is_one_page_without_a_network_that_shows_the_numbers(folders, capsys):
    run("report", "--bundle", folders / "bundle")
    shown = capsys.readouterr().out
    about = json.loads((folders / "bundle/bundle.json").read_text())
    assert f"{100 * about['codes']['alone']:.2f} %" in shown
    assert f"{about['codes']['levels'][1]['perplexity']:.1f}" in shown
    text = (folders / "bundle-report.html").read_text(encoding="utf-8")
    assert text.count("<svg") == 3 and not re.search(r"(?:src|href)=|https?://", text)
    # A bar for each code of both levels, and their heights stand for the items.
    read = bundle.read_bundle(folders / "bundle")
    for level in range(2):
        for count in np.bincount(read.codes[:, level], minlength=6):
            assert f": {count} items</title>" in text
    inside = ["report", "--bundle", str(folders / "bundle"), "--html", str(folders / "bundle/x.html")]
    assert main(inside) == 2 and "lies in the bundle" in capsys.readouterr().err


def test_text_of_ids_is_escaped(folders):
    read = bundle.read_bundle(folders / "bundle")
    evil = bundle.Bundle(read.about, pl.Series(["<b>"] * 60), read.codes, read.digits, read.quantizer)
    assert "<b>&" not in page.build(evil, "<i>") and "&lt;b&gt;" in page.build(evil, "<i>")
    assert "<i>" not in page.build(evil, "<i>")
