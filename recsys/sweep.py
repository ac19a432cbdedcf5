"""`python -m recsys.sweep`: trains combinations of settings and compares their metrics on validation."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from recsys import cli
from recsys.config import fields
from recsys.errors import ConfigError, Terminated


def run(call: cli.Call) -> None:
    """Train every combination of the settings of --vary, or test which learning rate fits (--find-lr)."""
    # Heavy imports come late, because --help, --validate and --print-config need none of them.
    from recsys import environment

    flags = call.flags
    if bool(flags.vary) == flags.find_lr or flags.config is None:
        raise ConfigError("give --config, and either --vary or --find-lr")
    environment.import_torchrec_quietly()
    from recsys.data.workers.processes import start_server
    from recsys.training import sweep
    from recsys.training.distributed import process_group
    from recsys.training.run import train

    if flags.find_lr:
        _find_rate(call)
        return
    points = sweep.combine(Path(flags.config), flags.set, [sweep.parse_setting(text) for text in flags.vary])
    if flags.dry_run:
        print("\n".join(point.name for point in points))
        return
    if call.pipeline.data.num_workers:
        start_server()
    folder = flags.run_dir or Path("runs") / f"{Path(flags.config).stem}-sweep"
    with process_group() as processes:
        results = sweep.sweep(
            points, Path(folder), lambda point, place: train(point.ready.pipeline, place, processes)
        )
        if processes.is_main and results:
            best_first = sweep.ordered(results, points[0].ready.pipeline)
            print("\n".join([*sweep.table(best_first), f"report: {Path(folder) / sweep.REPORT}", "next:"]))
            print("\n".join(f"  {command}" for command in sweep.commands(best_first[0], Path(folder))))
    if len(results) < len(points):
        raise Terminated("stopped by a signal; start the same command again to resume", 15)


def _find_rate(call: cli.Call) -> None:
    from recsys.training.distributed import process_group
    from recsys.training.rate_test import find_rate

    with process_group() as processes:
        tested = find_rate(call.pipeline, processes)
        if processes.is_main:
            shown = list(zip(tested.rates, tested.losses, strict=True))
            for rate, loss in shown[:: max(1, len(shown) // 20)]:
                print(f"{rate:>8.1e}  {loss:.4f}")
            print("the loss falls fastest at the suggested rate; small logs may want 3 to 5 times as much")
            chosen = fields.name_of(fields.chosen(call.pipeline.train.dense_optimizer))
            print(f"suggested: --set train.dense_optimizer.{chosen}.lr={tested.suggested:g}")


def _add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sweep flags")
    about = "values to try, such as 'model.embedding_dim=[32,64]'; may be repeated, for all combinations"
    group.add_argument("--vary", metavar="PATH=[...]", action="append", default=[], help=about)
    group.add_argument("--find-lr", action="store_true", help="test growing learning rates instead")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return cli.main("sweep", run, arguments, add_flags=_add_flags)


if __name__ == "__main__":
    raise SystemExit(main())
