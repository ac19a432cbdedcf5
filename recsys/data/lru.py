"""A small cache of the values that were used last."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Lru(Generic[Value]):
    """Keeps the `capacity` values that were asked for last."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a cache holds at least 1 value; capacity is {capacity}")
        self._capacity = capacity
        self._values: OrderedDict[Hashable, Value] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """Returns the value under `key`; makes it when it is not there."""
        if key not in self._values:
            value = make()
            while len(self._values) >= self._capacity:
                self._values.popitem(last=False)
            self._values[key] = value
        self._values.move_to_end(key)
        return self._values[key]
