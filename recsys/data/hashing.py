"""Computes one fixed 64-bit hash for ids, orders and random draws.

A changed line here invalidates trained models; tests pin the values. Every random number in the data path is
a hash of its coordinates (seed, epoch, row, position) and never comes from the state of a generator, so it
does not depend on which process asks, how often, or in which order.
"""

import numpy as np
import pyarrow as pa

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_WORD = 8
_LONG = 4096
"""Length in bytes up to which texts are hashed together; the rest of a longer text is hashed by itself."""
AT_A_TIME = 16_384
"""Values hashed at a time: few enough to stay in the processor's cache."""


def mix(values: np.ndarray) -> np.ndarray:
    """Applies the step of SplitMix64, a bijection of 64-bit words in which every input bit reaches every
    output bit (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014).

    Args:
        values: int64 or uint64, any shape; the bits of int64 are reinterpreted as uint64.

    Returns:
        uint64 of the same shape.
    """
    mixed = values.astype(np.uint64, order="C")
    words = mixed.reshape(-1)
    spare = np.empty(min(AT_A_TIME, len(words)), np.uint64)
    for start in range(0, len(words), AT_A_TIME):
        x = words[start : start + AT_A_TIME]
        shifted = spare[: len(x)]
        x += _GOLDEN
        x ^= np.right_shift(x, np.uint64(30), out=shifted)
        x *= np.uint64(0xBF58476D1CE4E5B9)
        x ^= np.right_shift(x, np.uint64(27), out=shifted)
        x *= np.uint64(0x94D049BB133111EB)
        x ^= np.right_shift(x, np.uint64(31), out=shifted)
    return mixed


def combine(*parts: int | np.ndarray) -> np.ndarray:
    """Hashes several integers or arrays that broadcast against each other; their order matters.

    Returns:
        uint64, at least 1-d.
    """
    state = np.zeros(1, np.uint64)
    for part in parts:
        state = mix(state ^ np.asarray(part, np.int64).astype(np.uint64))
    return state


def uniform(hashes: np.ndarray) -> np.ndarray:
    """Maps hashes to float64 in [0, 1), using their upper 53 bits."""
    return (hashes >> np.uint64(11)) * 2.0**-53


def buckets(hashes: np.ndarray, count: int) -> np.ndarray:
    """Maps hashes to int64 in [0, count), using their upper 32 bits; count is at most 2^32.

    It multiplies instead of dividing, which would cost as much as the hash (Lemire: Fast random integer
    generation in an interval, 2019).
    """
    return (((hashes >> np.uint64(32)) * np.uint64(count)) >> np.uint64(32)).astype(np.int64)


def draw_places(offsets: np.ndarray, rate: float, rows: np.ndarray) -> np.ndarray:
    """Draws each element with probability `rate` and returns the flat indices of the drawn ones.

    The draws of a row depend only on the row's hash. The gap to a row's next drawn element is geometric, so
    the work is proportional to the number of drawn elements.

    Args:
        offsets: int64 [rows + 1]; row i has the elements offsets[i] to offsets[i + 1].
        rate: in (0, 1].
        rows: uint64 [rows], the hash of each row.
    """
    drawn, place, active = [], offsets[:-1] - 1, np.arange(len(rows))
    log_keep = np.log1p(-rate) if rate < 1 else -np.inf
    while len(active):
        rows = mix(rows)
        gap = np.log1p(-uniform(rows)) / log_keep
        # A gap that leaves the row may be larger than an integer.
        place = place + 1 + np.minimum(gap, offsets[active + 1] - place).astype(np.int64)
        inside = place < offsets[active + 1]
        active, place, rows = active[inside], place[inside], rows[inside]
        drawn.append(place)
    return np.concatenate(drawn) if drawn else np.empty(0, np.int64)


def hash_text(values: pa.Array) -> np.ndarray:
    """Hashes each string to uint64: `combine` over its length and the little-endian 8-byte words of its UTF-8
    bytes.

    Args:
        values: string or large_string without nulls.
    """
    values = values.cast(pa.large_string())
    offsets = np.frombuffer(values.buffers()[1], np.int64)[values.offset : values.offset + len(values) + 1]
    starts, lengths = offsets[:-1], np.diff(offsets)
    state = mix(lengths)
    # Copied once: a copy for each word would take minutes for a text of a megabyte.
    padded = np.concatenate([np.frombuffer(values.buffers()[2] or b"", np.uint8), np.zeros(_WORD, np.uint8)])
    for word in range(0, min(int(lengths.max(initial=0)), _LONG), _WORD):
        open_rows = np.flatnonzero(lengths > word)
        words = _words(padded, starts[open_rows] + word, lengths[open_rows] - word)
        state[open_rows] = mix(state[open_rows] ^ words)
    for row in np.flatnonzero(lengths > _LONG):
        tail = padded[starts[row] + _LONG : starts[row] + lengths[row]].tobytes()
        state[row] = _mix_words(
            int(state[row]), np.frombuffer(tail + bytes(-len(tail) % _WORD), "<u8").tolist()
        )
    return state


def _mix_words(state: int, words: list[int]) -> int:
    """Applies `state = mix(state ^ word)` word by word, faster than `mix` for a single text."""
    limit = 2**64 - 1
    for word in words:
        x = ((state ^ word) + int(_GOLDEN)) & limit
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & limit
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & limit
        state = x ^ (x >> 31)
    return state


def _words(padded: np.ndarray, starts: np.ndarray, remaining: np.ndarray) -> np.ndarray:
    # A word may begin at any byte, so the view has a stride of one byte; zeros follow the last string.
    at_each_byte = np.ndarray((len(padded) - _WORD + 1,), "<u8", padded, strides=(1,))
    unused_bits = (_WORD - np.minimum(remaining, _WORD)).astype(np.uint64) * np.uint64(8)
    return at_each_byte[starts] & (np.uint64(2**64 - 1) >> unused_bits)
