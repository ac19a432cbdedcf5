"""`python -m recsys.predict`: reads files with original ids and writes scores or recommendations.

It runs an exported package or, with `--checkpoint`, the model of a run without compiling it.

With `torchrun --nproc-per-node N -m recsys.predict ...`, N processes share the row groups of the input.
"""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import recsys.config as config
from recsys import cli
from recsys.errors import ConfigError
from recsys.package_flags import add_verify_key, package_folder, packaged_config

MAY_CHANGE = ("predict", "data.bad_rows", "data.key_columns", "data.test")
"""Fields of a package's config that `--set` may change; all other fields were compiled in."""

if TYPE_CHECKING:
    from recsys.inference.eager import EagerPackage
    from recsys.inference.package import Package

log = logging.getLogger("recsys.predict")


def run(call: cli.Call) -> None:
    """Score candidates, or recommend items, with an exported package or a checkpoint."""
    fixed = [override for override in call.flags.set if not override.startswith(MAY_CHANGE)]
    if fixed:
        rule = f"fixed by training and export; only {', '.join(MAY_CHANGE)} may change"
        raise ConfigError([f"--set {override}: {rule}" for override in fixed])
    # Heavy imports come late, because --help, --validate and --print-config need none of them.
    from recsys import environment

    environment.import_torchrec_quietly()
    from recsys.data.sources import open_source
    from recsys.inference.predict_files import PATIENCE, predict
    from recsys.inference.predictor import Predictor
    from recsys.inference.rows import given_source
    from recsys.training.distributed import process_group

    # The process group comes first, because it chooses the GPU of this process.
    with process_group(PATIENCE):
        package = _load(call)
        predictor = Predictor(package, call.pipeline)
        source = open_source(given_source(call.flags.input, call.pipeline), predictor.pipeline)
        if call.dry_run:
            log.info("dry run: the model is loaded and checked; %d rows would be scored", source.num_rows)
            return
        done = predict(predictor, source, Path(call.flags.output or call.run_dir / "predictions"))
    log.info("%d rows, %d of them left out as bad: %s", done.rows, done.left_out, done.folder)


def _load(call: cli.Call) -> "Package | EagerPackage":
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


def _config_file(flags: argparse.Namespace) -> Path:
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


def _add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("predict flags")
    group.add_argument("--package", metavar="DIR", help="made by recsys.export (default: <run-dir>/export)")
    add_verify_key(group)
    about = "use a checkpoint of the run instead of a package: best, newest, or the number of a step"
    group.add_argument("--checkpoint", metavar="WHICH", help=about)
    files = "parquet or .csv files, folders or patterns (default: data.test)"
    group.add_argument("--input", metavar="PATH", nargs="+", help=files)
    group.add_argument("--output", metavar="DIR", help="predictions (default: <run-dir>/predictions)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return cli.main("predict", run, arguments, add_flags=_add_flags, config_file=_config_file)


if __name__ == "__main__":
    raise SystemExit(main())
