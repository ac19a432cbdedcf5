"""Flags of the commands that load a package, and the files that these flags name."""

import argparse
import copy
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import recsys.config as config
from recsys import cli
from recsys.errors import ConfigError

if TYPE_CHECKING:
    from recsys.inference.eager import EagerPackage
    from recsys.inference.package import Package
    from recsys.training.distributed import Processes

MAY_CHANGE_IN_EVALUATION = (
    "data.train",
    "data.validation",
    "data.test",
    "data.bad_rows",
    "data.item_file",
    "data.eval_batch_size",
    "data.num_workers",
)
"""Fields of a package's config that an evaluation may change: they say which rows are read, and how."""

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


def require_changeable(flags: argparse.Namespace, fields: tuple[str, ...]) -> None:
    """Checks that `--set` changes nothing that was compiled into a package.

    Raises:
        ConfigError: lists the flags that change other fields than `fields`.
    """
    rule = f"fixed by training and export; only {', '.join(fields)} may change"
    if fixed := [override for override in flags.set if not override.startswith(fields)]:
        raise ConfigError([f"--set {override}: {rule}" for override in fixed])


def load_to_predict(call: cli.Call) -> "Package | EagerPackage":
    """Loads what `recsys.predict` runs: a package or, with `--checkpoint`, the model of a run."""
    flags = call.flags
    if flags.checkpoint is None:
        from recsys.inference.package import Package

        return Package(package_folder(flags), verify_key=flags.verify_key)
    from recsys.inference.eager import load_eager

    loaded = load_eager(call.run_dir, flags.checkpoint, call.pipeline)
    log.info("predicting with %s, which is not compiled", loaded.folder)
    return loaded


def measure_package(call: cli.Call, processes: "Processes", limit: int | None) -> dict[str, float]:
    """Computes the metrics of the package that `--package` names. Collective.

    With `--run-dir`, it also logs how far the package's answers are from those of the evaluated model.

    Args:
        limit: the most batches that each rank reads; None reads all.
    """
    from recsys.data.loader import Loader
    from recsys.evaluation.protocol import describe, protocol
    from recsys.inference.eager import load_eager
    from recsys.inference.package import Package
    from recsys.inference.package_evaluation import evaluate_package
    from recsys.models import layout_rule

    flags, reference = call.flags, None
    require_changeable(flags, MAY_CHANGE_IN_EVALUATION)
    package = Package(package_folder(flags), verify_key=flags.verify_key)
    most, rows = package.description.max_batch_size, call.pipeline.data.eval_batch_size
    if rows > most:
        raise ConfigError(
            f"data.eval_batch_size: {rows} is more than the {most} rows that the package accepts "
            f"(export.max_batch_size); give --set data.eval_batch_size={most}"
        )
    step = package.description.step
    if flags.run_dir is not None:
        reference = load_eager(call.run_dir, str(step), package.pipeline)
    settings = copy.deepcopy(package.pipeline)
    settings.data.CopyFrom(call.pipeline.data)
    share = {"rank": processes.rank, "world_size": processes.world_size}
    loader = Loader.open(settings, flags.split, layout_rule(settings), mode="evaluate", **share)
    result = evaluate_package(package, loader, processes.device, limit, reference)
    if processes.is_main:
        if settings := protocol(call.pipeline):
            log.info("protocol: %s", describe(settings))
        log.info("%s (step %d) on %s rows", package.folder, step, flags.split)
        if result.difference is not None:
            log.info("largest difference from the evaluated model: %.1e", result.difference)
    return result.metrics


def config_to_evaluate(flags: argparse.Namespace) -> Path | None:
    """Returns the config of the package that `--package` names; None if a run is to be evaluated."""
    if flags.package is None:
        if flags.verify_key is not None:
            raise ConfigError("--verify-key: it is for a package; name one in --package")
        return None
    if flags.compare is not None:
        raise ConfigError(f"--compare-{flags.compare}: it needs the model of a run; leave --package out")
    if flags.checkpoint != "best":
        raise ConfigError("--checkpoint: a package has the weights of one state; leave --package or this out")
    return packaged_config(flags)


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
