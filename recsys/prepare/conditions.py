"""Parses conditions on a column that set a label or an action, such as `rating>=4` or `event==purchase`."""

import operator
import re
from collections.abc import Callable
from typing import Any, NamedTuple

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}

_CONDITION = re.compile(r"(?P<column>.+?)(?P<sign>>=|<=|==|!=|>|<)(?P<value>.*)", re.DOTALL)


class Signal(NamedTuple):
    """The origin of a label or an action.

    Attributes:
        column: the column of the log.
        sign: one of `OPERATORS`; "" takes the column's value unchanged.
        value: the value that the column is compared with.
    """

    column: str
    sign: str = ""
    value: str = ""

    @classmethod
    def parse(cls, text: str) -> "Signal":
        """Parses a text such as `COLUMN` or `COLUMN>=4`.

        Raises:
            ValueError: the text compares by order with a value that is not a number, such as `>=high`, or it
                writes the sign as `=>`.
        """
        match = _CONDITION.fullmatch(text)
        if match is None:
            return cls(text)
        signal = cls(**{name: part.strip() for name, part in match.groupdict().items()})
        if signal.column.endswith("=") and signal.sign + "=" in OPERATORS:
            raise ValueError(f"={signal.sign} is not a comparison sign; did you mean {signal.sign}=?")
        if signal.number is None and signal.sign not in ("==", "!="):
            raise ValueError(f"{signal.value!r} is not a number; {signal.sign} compares numbers")
        return signal

    @property
    def number(self) -> float | None:
        """Returns the value as a number, or None if it is a text, which is compared literally."""
        try:
            number = float(self.value)
        except ValueError:
            return None
        return number if abs(number) < float("inf") else None

    def __str__(self) -> str:
        return f"{self.column}{self.sign}{self.value}"
