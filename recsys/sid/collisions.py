"""Makes codes unique: items with the same codes get one more digit, in the order of their ids."""

import numpy as np

from recsys.errors import ConfigError

DIGITS = 256
"""Values of the extra digit, 0 to 255."""


def spread_unknown(codes: np.ndarray, vectors: np.ndarray, size: int, first: int = 0) -> np.ndarray:
    """Gives different codes to items that no source knows, whose vectors are all zeros.

    A quantizer gives all of them the same codes, and no setting of it can tell them apart. They keep the code
    of the first level, by which a model can learn what they have in common. The codes of the other levels
    number them in the order of their ids.

    Args:
        codes: integer [items, levels].
        vectors: [items, D].
        size: number of codes per level.
        first: number from which these items are counted.
    """
    rows = np.flatnonzero(~vectors.any(1))
    spread, number = codes.copy(), first + np.arange(len(rows))
    for level in range(codes.shape[1] - 1, 0, -1):
        spread[rows, level], number = number % size, number // size
    return spread


def extra_digits(codes: np.ndarray) -> np.ndarray:
    """Returns the extra digit of each item, int64 [items].

    Args:
        codes: integer [items, levels], items in the order of their ids.

    Raises:
        ConfigError: more than `DIGITS` items have the same codes.
    """
    return free_digits(codes, np.zeros((0, codes.shape[1]), np.int64), np.zeros(0, np.int64))


def free_digits(codes: np.ndarray, old_codes: np.ndarray, old_digits: np.ndarray) -> np.ndarray:
    """Returns digits for new items that no other item with the same codes has.

    Args:
        codes: integer [new, levels], new items in the order of their ids.
        old_codes: integer [old, levels].
        old_digits: integer [old].

    Raises:
        ConfigError: more than `DIGITS` items, old and new, have the same codes.
    """
    groups = np.unique(np.concatenate([old_codes, codes]), axis=0, return_inverse=True)[1].reshape(-1)
    sizes = np.bincount(groups)
    if len(sizes) and sizes.max() > DIGITS:
        raise ConfigError(
            f"{sizes.max():,} items share one code, and the extra digit tells {DIGITS} apart; raise --levels "
            "or --size, balance the assignment (--balanced), or add a source that tells these items apart"
        )
    taken: dict[int, set[int]] = {}
    for group, digit in zip(groups[: len(old_codes)].tolist(), old_digits.tolist(), strict=True):
        taken.setdefault(group, set()).add(digit)
    digits = []
    for group in groups[len(old_codes) :].tolist():
        used = taken.setdefault(group, set())
        # Usually the digits of a group have no gaps: they are 0 to n - 1.
        digit = len(used)
        if digit in used or digit >= DIGITS:
            digit = next(place for place in range(DIGITS) if place not in used)
        used.add(digit)
        digits.append(digit)
    return np.array(digits, np.int64)
