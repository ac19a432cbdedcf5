"""A small cache that keeps the most recently used values."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Lru(Generic[Value]):
    """Keeps the `capacity` most recently used values."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a cache holds at least 1 value; capacity is {capacity}")
        self._capacity = capacity
        self._values: OrderedDict[Hashable, Value] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """Returns the value of `key`, and calls `make` for it if the cache does not hold one."""
        if key not in self._values:
            value = make()
            while len(self._values) >= self._capacity:
                self._values.popitem(last=False)
            self._values[key] = value
        self._values.move_to_end(key)
        return self._values[key]
