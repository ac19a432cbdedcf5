"""`python -m recsys.evaluate`: computes the metrics of a trained model, or of a package, on a split.

`recsys.evaluate(...)` calls the library's function `recsys.api.evaluate`.
"""

import argparse
from collections.abc import Sequence

from recsys import cli
from recsys.callable_module import make_callable
from recsys.package_flags import add_verify_key, config_to_evaluate, measure_package

COMPARISONS = {
    "exact": "beam search: also the share of the exactly best items that beams of several widths find (slow)",
    "weights": "ids and codes: also NDCG with other weights of ids; choose one with --split validation",
    "popularity": "next-item models: also metrics of targets that are frequent, rare, or new in training",
}
"""Help of the flags that add figures to those of an evaluation."""


def run(call: cli.Call) -> None:
    """Evaluate a trained model, or an exported package, on the validation or test rows."""
    # Heavy imports come late, because --help, --validate and --print-config need none of them.
    from recsys import environment
    from recsys.data.workers.processes import start_server

    if call.pipeline.data.num_workers:
        start_server()
    environment.import_torchrec_quietly()
    from recsys.training.distributed import process_group
    from recsys.training.evaluation_record import record
    from recsys.training.run import evaluate

    limit = 1 if call.dry_run else None
    flags = call.flags
    with process_group() as processes:
        if flags.package is not None:
            metrics = measure_package(call, processes, limit)
        else:
            chosen = (flags.split, flags.checkpoint, limit, flags.compare)
            result = evaluate(call.pipeline, call.run_dir, processes, *chosen)
            metrics = result.metrics
        if processes.is_main:
            for name, value in metrics.items():
                print(f"{name:<{max(map(len, metrics))}}  {value:.5f}")
            if flags.package is None and not call.dry_run:
                record(result, call.pipeline, call.run_dir, flags.split)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this command."""
    parser.add_argument(
        "--split", choices=["train", "validation", "test"], default="test", help="default: test"
    )
    cli.add_checkpoint(parser)
    about = "evaluate this package instead; with --run-dir, also compare it with the model of that run"
    parser.add_argument("--package", metavar="DIR", help=about)
    add_verify_key(parser)
    comparisons = parser.add_mutually_exclusive_group()
    for name, about in COMPARISONS.items():
        flag = f"--compare-{name}"
        comparisons.add_argument(flag, dest="compare", action="store_const", const=name, help=about)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return cli.main("evaluate", run, arguments, add_flags=add_flags, config_file=config_to_evaluate)


make_callable(__name__)

if __name__ == "__main__":
    raise SystemExit(main())
