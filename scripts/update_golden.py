"""Write `tests/golden/`: every runnable config, resolved, so that a changed default is a visible diff.

python scripts/update_golden.py            # write
python scripts/update_golden.py --check    # exit 1 when a file is missing, stale or left over
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import recsys.config as config
from recsys.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the resolved form of every config to tests/golden/.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if there is something to do"
    )
    check = parser.parse_args(argv).check
    try:
        wanted = {path.name: resolved(path) for path in configs()}
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    GOLDEN.mkdir(exist_ok=True)
    present = {path.name: path.read_text(encoding="utf-8") for path in GOLDEN.glob("*.config")}
    changed = sorted(name for name in wanted | present if wanted.get(name) != present.get(name))
    for name in changed:
        print(f"tests/golden/{name}")
        if check:
            continue
        if name in wanted:
            (GOLDEN / name).write_text(wanted[name], encoding="utf-8")
        else:
            (GOLDEN / name).unlink()
    return 1 if check and changed else 0


def configs() -> list[Path]:
    """The runnable configs."""
    return sorted((ROOT / "configs").glob("*.config"))


def resolved(path: Path) -> str:
    """Text of a config with everything filled in; files that it names need not be there.

    Raises:
        ConfigError: the config cannot be used.
    """
    ready = config.prepare(path, read_files=False)
    return config.to_text(ready.pipeline, ready.origins)


if __name__ == "__main__":
    sys.exit(main())
