"""`python -m recsys.train`: trains the model of a config, or continues a run that stopped."""

import argparse
from collections.abc import Sequence

from recsys import cli
from recsys.errors import ConfigError, Terminated
from recsys.flags import positive


def run(call: cli.Call) -> None:
    """Train a model; a run that stopped resumes from its saved state."""
    # Heavy imports come late, because --help, --validate and --print-config need none of them.
    from recsys import environment
    from recsys.data.workers.processes import start_server

    if call.pipeline.data.num_workers:
        start_server()
    environment.import_torchrec_quietly()
    from recsys.training.distributed import collective_timeout, process_group
    from recsys.training.dry_run import dry_run
    from recsys.training.hooks.profile import Profile
    from recsys.training.run import folder_hooks, train

    profiles = [Profile(call.flags.profile)] if call.flags.profile else []
    if call.dry_run and profiles:
        raise ConfigError("--profile: --dry-run trains one step only; leave one of them out")
    with process_group(collective_timeout(call.pipeline.train)) as processes:
        if call.dry_run:
            dry_run(call.pipeline, processes)
            return
        outcome = train(
            call.pipeline, call.run_dir, processes, hooks=lambda session: [*folder_hooks(session), *profiles]
        )
    if outcome.signal:
        raise Terminated(f"stopped by signal {outcome.signal}, saved as {outcome.checkpoint}", outcome.signal)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this command."""
    about = "record N steps of the first process in profile.json.gz, in the run folder"
    parser.add_argument("--profile", metavar="N", type=positive, help=about)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return cli.main("train", run, arguments, add_flags=add_flags)


if __name__ == "__main__":
    raise SystemExit(main())
