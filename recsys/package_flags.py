"""Flags of the commands that load a package, and the files that these flags name."""

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import recsys.config as config
from recsys import cli
from recsys.errors import ConfigError

if TYPE_CHECKING:
    from recsys.inference.eager import EagerPackage
    from recsys.inference.package import Package

log = logging.getLogger("recsys.predict")


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


def load_to_predict(call: cli.Call) -> "Package | EagerPackage":
    """Loads what `recsys.predict` runs: a package or, with `--checkpoint`, the model of a run."""
    flags = call.flags
    if flags.checkpoint is None:
        from recsys.inference.package import Package

        return Package(package_folder(flags), verify_key=flags.verify_key)
    import torch

    from recsys.inference.eager import EagerPackage
    from recsys.training import checkpoint
    from recsys.training.resume import require_same_model
    from recsys.training.session import CHECKPOINTS
    from recsys.training.stored_table import load_model

    path = checkpoint.find(call.run_dir / CHECKPOINTS, flags.checkpoint)
    require_same_model(checkpoint.read_state(path), call.pipeline, path)
    log.info("predicting with %s, which is not compiled", path)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return EagerPackage(load_model(path, call.pipeline).model.to(device), path)


def config_to_predict(flags: argparse.Namespace) -> Path:
    """Returns the config of the package or, with `--checkpoint`, of the run."""
    if flags.checkpoint is None:
        return packaged_config(flags)
    if flags.package or flags.verify_key or flags.config:
        raise ConfigError("--checkpoint: give it with --run-dir, without --package, --verify-key or --config")
    if flags.run_dir is None:
        raise ConfigError("--checkpoint: give the run folder that has it in --run-dir")
    path = Path(flags.run_dir) / config.FILE_NAME
    if not path.is_file():
        raise ConfigError(f"--run-dir {flags.run_dir}: holds no run (no {config.FILE_NAME} in it)")
    return path
