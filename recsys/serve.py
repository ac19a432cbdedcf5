"""`python -m recsys.serve`: scores or recommendations of a package over HTTP."""

from collections.abc import Sequence

from recsys import cli
from recsys.errors import ConfigError, InstallationError
from recsys.serve_flags import add_flags, check, first_config, folders, user_store

_MIB = 1 << 20


def run(call: cli.Call) -> None:
    """Answer requests over HTTP with an exported package."""
    flags = call.flags
    if flags.set:
        raise ConfigError("--set: a package is served as it was exported")
    # Imports that take long come last: --help needs none of them.
    try:
        from recsys.serving import server
        from recsys.serving.application import ServingOptions
        from recsys.serving.batcher import BatchLimits
        from recsys.serving.schema import RequestLimits
    except ModuleNotFoundError as error:
        problem = f"{error.name} is missing: pip install 'generative-recsys[serve]'"
        raise InstallationError(problem) from error

    token = server.read_token(flags.token_file, flags.token_env)
    check(flags, token)
    max_body = flags.max_body_mib * _MIB
    settings = server.ServerSettings(
        flags.host,
        flags.port,
        flags.grace_s,
        flags.share or 0.0,
        flags.page_rows,
        flags.item_names,
        flags.verify_key,
        user_store(flags),
        flags.processes,
    )
    server.serve(
        folders(flags),
        settings,
        ServingOptions(flags.deadline_ms / 1000, flags.max_queue, max_body, 8 * max_body, token),
        RequestLimits(flags.max_rows, flags.max_history, flags.max_candidates),
        BatchLimits(flags.max_batch, flags.max_wait_ms / 1000, flags.max_queue),
        dry_run=call.dry_run,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return cli.main(
        "serve", run, arguments, add_flags=add_flags, config_file=first_config, takes_config=False
    )


if __name__ == "__main__":
    raise SystemExit(main())
