"""`python -m recsys.predict`: reads files with original ids and writes scores or recommendations.

With `torchrun --nproc-per-node N -m recsys.predict ...`, N processes share the row groups of the input.
"""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from recsys import cli
from recsys.errors import ConfigError
from recsys.package_flags import add_verify_key, package_folder, packaged_config

MAY_CHANGE = ("predict", "data.bad_rows", "data.key_columns", "data.test")
"""Fields of a package's config that `--set` may change; all other fields were compiled in."""

log = logging.getLogger("recsys.predict")


def run(call: cli.Call) -> None:
    """Score candidates, or recommend items, with an exported package."""
    fixed = [override for override in call.flags.set if not override.startswith(MAY_CHANGE)]
    if fixed:
        rule = f"compiled into the package; only {', '.join(MAY_CHANGE)} may change"
        raise ConfigError([f"--set {override}: {rule}" for override in fixed])
    # Heavy imports come late, because --help, --validate and --print-config need none of them.
    from recsys import environment

    environment.import_torchrec_quietly()
    from recsys.data.sources import open_source
    from recsys.inference.package import Package
    from recsys.inference.predict_files import PATIENCE, predict
    from recsys.inference.predictor import Predictor
    from recsys.inference.rows import given_source
    from recsys.training.distributed import process_group

    # The process group comes first, because it chooses the GPU of this process.
    with process_group(PATIENCE):
        package = Package(package_folder(call.flags), verify_key=call.flags.verify_key)
        predictor = Predictor(package, call.pipeline)
        source = open_source(given_source(call.flags.input, call.pipeline), predictor.pipeline)
        if call.dry_run:
            log.info("dry run: the package answers its golden rows; %d rows would be scored", source.num_rows)
            return
        done = predict(predictor, source, Path(call.flags.output or call.run_dir / "predictions"))
    log.info("%d rows, %d of them left out as bad: %s", done.rows, done.left_out, done.folder)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("predict flags")
    group.add_argument("--package", metavar="DIR", help="made by recsys.export (default: <run-dir>/export)")
    add_verify_key(group)
    files = "parquet or .csv files, folders or patterns (default: data.test)"
    group.add_argument("--input", metavar="PATH", nargs="+", help=files)
    group.add_argument("--output", metavar="DIR", help="predictions (default: <run-dir>/predictions)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return cli.main("predict", run, arguments, add_flags=_add_flags, config_file=packaged_config)


if __name__ == "__main__":
    raise SystemExit(main())
