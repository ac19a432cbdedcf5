"""`python -m recsys.blend`: blends a trained model with co-occurrence, which helps on logs with few users."""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from recsys import cli

if TYPE_CHECKING:
    from recsys.inference.blended import BlendReport

logger = logging.getLogger("recsys.blend")


def run(call: cli.Call) -> None:
    """Blend a trained model with item co-occurrence: measure it, and recommend with it if asked to."""
    # Heavy imports come late, because --help, --validate and --print-config need none of them.
    from recsys import environment

    environment.import_torchrec_quietly()
    from recsys.evaluation.blend import Blend, encode
    from recsys.inference import blended
    from recsys.inference.rows import given_source
    from recsys.training.distributed import process_group
    from recsys.training.run import load_model

    pipeline, flags = call.pipeline, call.flags
    blended.require_blendable(pipeline)
    with process_group() as processes:
        loaded = load_model(pipeline, call.run_dir, processes, flags.checkpoint)
        model = loaded.model.eval()
        validation = encode(pipeline, model, "validation", processes.device)
        blend = Blend.fit(pipeline, model, validation)
        reports = [blended.measure_blend(blend, pipeline, "validation", validation)]
        if pipeline.data.HasField("test"):
            test = encode(pipeline, model, "test", processes.device, validation.items)
            reports.append(blended.measure_blend(blend, pipeline, "test", test))
        for report in reports:
            _print(report)
        print(f"weight of co-occurrence: {blend.weight}, chosen on validation rows")
        if call.dry_run:
            return
        logger.info("%s", blended.write_blend(call.run_dir, loaded.checkpoint.name, blend, reports))
        if flags.output:
            source = given_source(flags.input, pipeline)
            arguments = (model, processes.device, source, validation.items, Path(flags.output))
            logger.info("%s", blended.recommend(blend, pipeline, *arguments))


def _print(report: "BlendReport") -> None:
    names = list(report.metrics["blend"])
    print(f"{report.split:<14}" + "".join(f"{name:>13}" for name in names))
    for model, metrics in report.metrics.items():
        print(f"{model:<14}" + "".join(f"{metrics[name]:>13.4f}" for name in names))


def _add_flags(parser: argparse.ArgumentParser) -> None:
    cli.add_checkpoint(parser)
    group = parser.add_argument_group("blend flags")
    group.add_argument("--output", metavar="DIR", help="also write recommendations into this folder")
    group.add_argument(
        "--input", metavar="PATH", nargs="+", help="rows to recommend for, with --output (default: data.test)"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return cli.main("blend", run, arguments, add_flags=_add_flags)


if __name__ == "__main__":
    raise SystemExit(main())
