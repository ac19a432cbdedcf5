"""The build backend named in `pyproject.toml`: setuptools, after compiling the protos.

pip calls these hooks for `pip install .`, `pip install -e .` and when a wheel or sdist is built, so that
`recsys.protos` is always there and never stale after an install.
"""

from __future__ import annotations

from compile_protos import compile_protos
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
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory: str, config_settings=None, metadata_directory: str | None = None) -> str:
    compile_protos()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory: str, config_settings=None) -> str:
    compile_protos()
    return build_meta.build_sdist(sdist_directory, config_settings)
