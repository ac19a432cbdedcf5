"""Fills two caches of the tests, which workers of pytest-xdist that start together would otherwise each fill.

    python scripts/warm_test_caches.py

pytest compiles a test with its assertions rewritten when it first imports it, and Hypothesis lists the
constants of all modules that have been imported. The functions that do it are not public: if they have
changed, this says so, and the workers do the work.
"""

import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent


def compile_tests() -> None:
    """Writes the compiled tests to where pytest looks for them."""
    from _pytest.assertion import AssertionState, rewrite
    from _pytest.config import get_config

    config = get_config()
    state = AssertionState(config, "rewrite")
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        folder = rewrite.get_cache_dir(path)
        rewrite.try_makedirs(folder)
        stamp, code = rewrite._rewrite_test(path, config)
        rewrite._write_pyc(state, code, stamp, folder / f"{path.stem}{rewrite.PYC_TAIL}")


def list_constants() -> None:
    """Writes the constants of modules to where Hypothesis looks for them, a folder of the current one."""
    from hypothesis.internal.constants_ast import constants_from_module

    for folder in ("recsys", "scripts", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            module = ModuleType(path.stem)
            module.__file__ = str(path)
            constants_from_module(module)


if __name__ == "__main__":
    for fill in (compile_tests, list_constants):
        try:
            fill()
        except (AttributeError, ImportError, TypeError, ValueError) as error:
            name = f"{Path(__file__).name}, {fill.__name__}"
            print(f"{name}: a library has changed ({error}), so each worker does this", file=sys.stderr)
