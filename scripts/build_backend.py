"""The build backend named in `pyproject.toml`: setuptools, after compiling the protos.

pip calls these hooks for `pip install .`, `pip install -e .` and when a wheel or sdist is built, so that
`recsys.protos` is always there and never stale after an install. A wheel also gets the ready configs.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from compile_protos import ROOT, compile_protos
from setuptools import build_meta
from setuptools.build_meta import (
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def build_wheel(wheel_directory: str, config_settings=None, metadata_directory: str | None = None) -> str:
    compile_protos()
    # setuptools would pack what earlier builds left there, such as modules that have been removed since.
    shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)
    with _ready_configs():
        return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory: str, config_settings=None, metadata_directory: str | None = None) -> str:
    compile_protos()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory: str, config_settings=None) -> str:
    compile_protos()
    return build_meta.build_sdist(sdist_directory, config_settings)


@contextmanager
def _ready_configs() -> Iterator[None]:
    """Copies `configs/*.config` into the package while a wheel is built; a clone reads its own `configs/`."""
    target = ROOT / "recsys" / "ready_configs"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    try:
        for file in (ROOT / "configs").glob("*.config"):
            shutil.copyfile(file, target / file.name)
        yield
    finally:
        shutil.rmtree(target)
