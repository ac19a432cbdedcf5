"""Flags of the commands that load a package, and the files that these flags name."""

import argparse
from pathlib import Path

import recsys.config as config
from recsys.errors import ConfigError


def package_folder(flags: argparse.Namespace) -> Path:
    """Returns the folder that `--package` names, or the package in the run folder."""
    if flags.package or flags.run_dir:
        return Path(flags.package or Path(flags.run_dir) / "export")
    raise ConfigError("--package: not given; name a folder made by recsys.export, or its run in --run-dir")


def packaged_config(flags: argparse.Namespace) -> Path:
    """Returns the config in the package that the flags name."""
    if flags.config is not None:
        raise ConfigError("--config: a package carries its own config; change it with --set")
    path = package_folder(flags) / config.FILE_NAME
    if not path.is_file():
        remedy = "`python -m recsys.export` makes one from a run"
        raise ConfigError(f"{path.parent}: there is no package here; {remedy}")
    return path


def add_verify_key(flags: argparse._ActionsContainer) -> None:
    """Adds the flag of commands that load only packages with a signature."""
    flags.add_argument(
        "--verify-key",
        metavar="FILE",
        type=Path,
        help="PEM file of an Ed25519 public key; load only a package that its owner signed",
    )
