"""`python -m recsys.predict`: reads files with original ids and writes scores or recommendations.

It runs an exported package or, with `--checkpoint`, the model of a run without compiling it.

With `torchrun --nproc-per-node N -m recsys.predict ...`, N processes share the row groups of the input.
"""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from recsys import cli
from recsys.package_flags import add_verify_key, config_to_predict, load_to_predict, require_changeable

MAY_CHANGE = ("predict", "data.bad_rows", "data.key_columns", "data.test")
"""Fields of a package's config that `--set` may change; all other fields were compiled in."""

log = logging.getLogger("recsys.predict")


def run(call: cli.Call) -> None:
    """Score candidates, or recommend items, with an exported package or a checkpoint."""
    require_changeable(call.flags, MAY_CHANGE)
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
        package = load_to_predict(call)
        predictor = Predictor(package, call.pipeline)
        source = open_source(given_source(call.flags.input, call.pipeline), predictor.pipeline)
        if call.dry_run:
            checked = (
                "the package answers its golden rows"
                if call.flags.checkpoint is None
                else "the model is loaded"
            )
            log.info("dry run: %s; %d rows would be scored", checked, source.num_rows)
            return
        done = predict(predictor, source, Path(call.flags.output or call.run_dir / "predictions"))
        if predictor.stored is not None:
            log.info("%s", predictor.stored.summary())
    log.info("%d rows, %d of them left out as bad: %s", done.rows, done.left_out, done.folder)


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
    return cli.main(
        "predict", run, arguments, add_flags=_add_flags, config_file=config_to_predict, takes_config=False
    )


if __name__ == "__main__":
    raise SystemExit(main())
