"""`python -m recsys.export`: compiles a checkpoint into a package that `recsys.predict` and services load."""

import argparse
import logging
import shlex
from collections.abc import Sequence
from pathlib import Path

from recsys import cli

log = logging.getLogger("recsys.export")


def run(call: cli.Call) -> None:
    """Compile a trained model into one folder, proven equal to the evaluated model on real rows."""
    # Heavy imports come late, because --help, --validate and --print-config need none of them.
    from recsys import environment

    environment.import_torchrec_quietly()
    import torch

    from recsys.inference import compiler, exporter, triton_repository
    from recsys.inference.package import Package
    from recsys.models import build_model
    from recsys.training import checkpoint
    from recsys.training.resume import require_same_model
    from recsys.training.session import CHECKPOINTS

    compiler.require_compiler()
    pipeline = call.pipeline
    path = checkpoint.find(call.run_dir / CHECKPOINTS, call.flags.checkpoint)
    require_same_model(checkpoint.read_state(path), pipeline, path)
    model = build_model(pipeline)
    checkpoint.load_weights(path, model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = [batch.to(device) for batch in exporter.comparison_rows(pipeline)]
    step = int(path.name.removeprefix("step-"))
    log.info("exporting %s (step %d)", path, step)
    if call.dry_run:
        log.info("dry run: %d batches to compare on, nothing is written", len(rows))
        return
    for_triton = call.flags.format == "triton"
    output = Path(call.flags.output or call.run_dir / ("triton" if for_triton else "export"))
    place = triton_repository.require_free(output) if for_triton else output
    done = exporter.export(exporter.ExportSource(pipeline, model.to(device).eval(), step, rows), place)
    log.info("%d real rows agree with the evaluated model to %.1e", done.rows, done.difference)
    log.info("package: %s", done.folder)
    if for_triton:
        package = Package(place)
        triton_repository.write_repository(output, package.pipeline, package.description)
        log.info("next: tritonserver --model-repository %s", shlex.quote(str(output.resolve())))
        return
    folder = shlex.quote(str(done.folder))
    log.info("next: python -m recsys.predict --package %s --input FILES --output DIR", folder)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this command."""
    group = parser.add_argument_group("export flags")
    group.add_argument(
        "--output",
        metavar="DIR",
        help="folder of the package, where an older one is replaced, or of Triton's model repository "
        "(default: <run-dir>/export, <run-dir>/triton)",
    )
    help_format = "a package, or one within a model repository for Triton Inference Server"
    group.add_argument("--format", choices=("package", "triton"), default="package", help=help_format)
    cli.add_checkpoint(group)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return cli.main("export", run, arguments, add_flags=add_flags)


if __name__ == "__main__":
    raise SystemExit(main())
