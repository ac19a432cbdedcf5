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

    from recsys.inference import compiler, exporter, package_files, triton_repository
    from recsys.training import checkpoint
    from recsys.training.resume import require_same_model
    from recsys.training.session import CHECKPOINTS
    from recsys.training.stored_table import load_model

    if call.flags.sign_key is not None:
        package_files.load_private_key(call.flags.sign_key)
    compiler.require_compiler()
    pipeline = call.pipeline
    path = checkpoint.find(call.run_dir / CHECKPOINTS, call.flags.checkpoint)
    require_same_model(checkpoint.read_state(path), pipeline, path)
    model, tables = load_model(path, pipeline)
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
    source = exporter.ExportSource(pipeline, model.to(device), step, rows, tables)
    done = exporter.export(source, place)
    log.info("%d real rows agree with the evaluated model to %.1e", done.rows, done.difference)
    log.info("package: %s", done.folder)
    if call.flags.sign_key is not None:
        package_files.sign(place, call.flags.sign_key)
    following = f"python -m recsys.predict --package {shlex.quote(str(place))} --input FILES --output DIR"
    if for_triton:
        triton_repository.write_repository(output)
        following = f"tritonserver --model-repository {shlex.quote(str(output.resolve()))}"
    log.info("next: %s", following)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this command."""
    group = parser.add_argument_group("export flags")
    group.add_argument(
        "--output",
        metavar="DIR",
        help="folder of the package or model repository (default: <run-dir>/export or <run-dir>/triton)",
    )
    about = "package (default), or a model repository for Triton Inference Server"
    group.add_argument("--format", choices=("package", "triton"), default="package", help=about)
    group.add_argument(
        "--sign-key", metavar="FILE", type=Path, help="Ed25519 private key (PEM) that signs it"
    )
    cli.add_checkpoint(group)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return cli.main("export", run, arguments, add_flags=add_flags)


if __name__ == "__main__":
    raise SystemExit(main())
