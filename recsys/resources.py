"""Finds files that come with the package: the ready configs and the sample of `recsys init`.

It uses only the standard library, because `recsys.install` runs before anything is installed.
"""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent

SAMPLE = _PACKAGE / "sample"
"""Folder of the sample: `events.csv`, its `LICENSE`, and `SOURCE.md`, which says what it is."""

PROTOS = _PACKAGE / "protos"
"""Folder of the compiled config language, which also holds its `.proto` files."""


def clone() -> Path | None:
    """Returns the root of the clone that this package runs from, or None if it is installed from a wheel."""
    root = _PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() and (root / "protos").is_dir() else None


def ready_configs() -> dict[str, Path]:
    """Returns the file of each ready config by its name, such as `ml_1m_hstu`.

    They are in `configs/` of a clone; the build hook copies them into a wheel. Configs that train on a
    clone's test data are left out, because elsewhere they find no data.
    """
    root = clone()
    folder = root / "configs" if root is not None else _PACKAGE / "ready_configs"
    files = {file.stem: file for file in sorted(folder.glob("*.config"))}
    return {name: file for name, file in files.items() if "tests/data/" not in file.read_text("utf-8")}
