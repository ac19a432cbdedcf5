"""The hash, against published values and a loop over Python integers."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys.data.hashing import buckets, combine, draw_places, hash_text, mix, uniform

MASK = 2**64 - 1


def splitmix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def text_hash(text: str) -> int:
    data = text.encode()
    state = splitmix(len(data))
    for at in range(0, len(data), 8):
        state = splitmix(state ^ int.from_bytes(data[at : at + 8], "little"))
    return state


def test_published_values_of_splitmix64():
    # The first outputs of the generator with seed 0 (its state grows by the golden ratio each time).
    golden = 0x9E3779B97F4A7C15
    states = np.array([(i * golden) & MASK for i in range(3)], np.uint64)
    assert [hex(x) for x in mix(states)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]


def test_negative_numbers_are_taken_by_their_bits():
    assert mix(np.array([-1, -(2**63)])).tolist() == [splitmix(MASK), splitmix(2**63)]


@given(st.lists(st.text(max_size=40)))
def test_text_equals_a_loop_over_its_words(texts):
    assert hash_text(pa.array(texts, pa.string())).tolist() == [text_hash(text) for text in texts]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_text_of_a_slice_is_that_of_its_strings(kind):
    array = pa.array(["ab", "", "a longer text", "x" * 17, "é"], kind)
    assert hash_text(array.slice(2, 2)).tolist() == [text_hash("a longer text"), text_hash("x" * 17)]


def test_a_text_and_the_same_text_with_zero_bytes_differ():
    assert len(set(hash_text(pa.array(["a", "a\0", "a\0\0", "", "\0"])).tolist())) == 5


def test_combine_depends_on_every_part_and_their_order():
    values = [combine(1, 2, 3), combine(1, 3, 2), combine(1, 2), combine(2, 2, 3), combine(1, 2, -3)]
    assert len({int(value[0]) for value in values}) == 5


def test_combine_broadcasts():
    both = combine(7, np.array([[1], [2]]), np.array([5, 6]))
    assert both.tolist() == [[int(combine(7, i, j)[0]) for j in (5, 6)] for i in (1, 2)]


def test_uniform_and_buckets_cover_their_ranges():
    ends = np.array([0, MASK], np.uint64)
    assert uniform(ends).tolist() == [0.0, 1 - 2.0**-53]
    for count in (1, 7, 2**32):
        assert buckets(ends, count).tolist() == [0, count - 1]
    counts = np.bincount(buckets(mix(np.arange(70_000)), 7))
    # 10,000 each, standard deviation 93.
    assert abs(counts - 10_000).max() < 5 * 93


@pytest.mark.parametrize("rate", [0.02, 0.3, 1.0])
def test_places_are_drawn_independently_with_the_rate(rate):
    rows, length = 20_000, 6
    offsets = np.arange(rows + 1) * length
    drawn = np.zeros(rows * length, bool)
    drawn[draw_places(offsets, rate, mix(np.arange(rows)))] = True
    drawn = drawn.reshape(rows, length)
    # Every place, and every pair of places, within 5 standard deviations.
    assert abs(drawn.mean(0) - rate).max() <= 5 * (rate * (1 - rate) / rows) ** 0.5
    for i, j in ((0, 1), (0, 5), (2, 4)):
        both, pair = (drawn[:, i] & drawn[:, j]).mean(), rate**2
        assert abs(both - pair) <= 5 * (pair * (1 - pair) / rows) ** 0.5


def test_places_of_a_row_depend_on_its_hash_only():
    hashes = mix(np.arange(50))
    lengths = np.arange(50) % 9
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    together = draw_places(offsets, 0.4, hashes)
    alone = [
        draw_places(np.array([0, n]), 0.4, hashes[i : i + 1]) + offsets[i] for i, n in enumerate(lengths)
    ]
    assert sorted(together.tolist()) == sorted(np.concatenate(alone).tolist())
    assert len(set(together.tolist())) == len(together)


def test_no_rows_and_empty_rows_draw_nothing():
    assert draw_places(np.array([0]), 0.5, np.empty(0, np.uint64)).tolist() == []
    assert draw_places(np.zeros(4, np.int64), 1.0, mix(np.arange(3))).tolist() == []


def test_a_long_text_is_copied_once(monkeypatch):
    text, copies, concatenate = "ab" * 20_001, [], np.concatenate
    monkeypatch.setattr(np, "concatenate", lambda arrays: copies.append(len(arrays)) or concatenate(arrays))
    (only,) = hash_text(pa.array([text]))
    assert len(copies) == 1
    content = text.encode()
    words = [int.from_bytes(content[place : place + 8], "little") for place in range(0, len(content), 8)]
    assert only == combine(len(content), *np.array(words, np.uint64).view(np.int64))[0]
