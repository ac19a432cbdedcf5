"""Lets a module be called like the library function of the same name.

`recsys.config` is a package and `recsys.evaluate` a command; in a notebook both are also functions. A module
that calls `make_callable(__name__)` remains a module, and calls of it go to `recsys.api`. Type checkers see
the function, which `recsys/__init__.py` declares for them.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class CallableModule(ModuleType):
    """A module that forwards calls to the function of the same name in `recsys.api`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function of the same name in `recsys.api`."""
        return getattr(import_module("recsys.api"), self.__name__.rpartition(".")[2])(*args, **kwargs)


def make_callable(name: str) -> None:
    """Turns the imported module `name` into a `CallableModule`, unless it runs as a program's `__main__`."""
    if name != "__main__":
        sys.modules[name].__class__ = CallableModule
