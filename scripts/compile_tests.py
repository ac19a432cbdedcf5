"""Compiles the tests as pytest does when it first imports them, to where it looks for them.

    python scripts/compile_tests.py

Workers of pytest-xdist that start together would each compile all tests. The functions of pytest that do it
are not public: if they have changed, this says so, and the workers compile the tests.
"""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"


def main() -> None:
    """Compiles all tests."""
    try:
        from _pytest.assertion import AssertionState, rewrite
        from _pytest.config import get_config

        config = get_config()
        state = AssertionState(config, "rewrite")
        for path in sorted(TESTS.rglob("test_*.py")):
            folder = rewrite.get_cache_dir(path)
            rewrite.try_makedirs(folder)
            stamp, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(state, code, stamp, folder / f"{path.stem}{rewrite.PYC_TAIL}")
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        name = Path(__file__).name
        print(f"{name}: pytest has changed ({error}), so its workers compile the tests", file=sys.stderr)


if __name__ == "__main__":
    main()
