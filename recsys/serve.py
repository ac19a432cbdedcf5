"""`python -m recsys.serve`: scores or recommendations of a package over HTTP."""

import argparse
from collections.abc import Sequence

from recsys import cli, environment
from recsys.errors import ConfigError, InstallationError
from recsys.flags import between
from recsys.predict import package_folder, packaged_config

_MIB = 1 << 20


def run(call: cli.Call) -> None:
    """Answer requests over HTTP with an exported package."""
    flags = call.flags
    if flags.set:
        raise ConfigError("--set: a package is served as it was exported")
    # Heavy imports come last: --help needs none of them.
    environment.import_torchrec_quietly()
    try:
        from recsys.serving import server
        from recsys.serving.application import ServingOptions
        from recsys.serving.batcher import BatchLimits
        from recsys.serving.schema import RequestLimits
    except ModuleNotFoundError as error:
        problem = f"{error.name} is missing: pip install 'generative-recsys[serve]'"
        raise InstallationError(problem) from error

    token = server.read_token(flags.token_file, flags.token_env)
    max_body = flags.max_body_mib * _MIB
    server.serve(
        package_folder(flags),
        server.ServerSettings(flags.host, flags.port, flags.grace_s),
        ServingOptions(flags.deadline_ms / 1000, flags.max_queue, max_body, 8 * max_body, token),
        RequestLimits(flags.max_rows, flags.max_history, flags.max_candidates),
        BatchLimits(flags.max_batch, flags.max_wait_ms / 1000, flags.max_queue),
        dry_run=call.dry_run,
    )


def _add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("serve flags")
    group.add_argument(
        "--package", metavar="DIR", help="folder made by recsys.export (default: <run-dir>/export)"
    )
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: this machine only)"
    )
    group.add_argument("--token-file", metavar="FILE", help="file with the token that requests must carry")
    group.add_argument("--token-env", metavar="NAME", help="environment variable that holds this token")
    for name, kind, default, least, about in (
        ("port", int, 8000, 0, "port to listen on; 0 picks a free one"),
        ("max-wait-ms", float, 2.0, 0, "how long the first request of a batch waits for others"),
        ("max-batch", int, 64, 1, "most rows that are scored together"),
        ("max-queue", int, 128, 1, "most rows, and most requests, that may wait; others get a 503"),
        ("deadline-ms", float, 1000.0, 1, "time limit of an answer; after it, a 504 is sent"),
        ("max-body-mib", int, 8, 1, "largest body of a request; larger ones get a 413"),
        ("max-rows", int, 256, 1, "most rows of a request"),
        ("max-history", int, 10_000, 1, "most events of a row"),
        ("max-candidates", int, 4_096, 1, "most candidates of a row"),
        ("grace-s", float, 20.0, 1, "time that requests in flight have after SIGTERM"),
    ):
        shown = f"{about} (default: {default:g})"
        most = 65_535 if name == "port" else 10**9
        group.add_argument(f"--{name}", type=between(least, most, kind), default=default, help=shown)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return cli.main("serve", run, arguments, add_flags=_add_flags, config_file=packaged_config)


if __name__ == "__main__":
    raise SystemExit(main())
