"""The flags of `python -m recsys.serve`, and which of them go together."""

import argparse
from pathlib import Path

from recsys import protos as pb
from recsys.errors import ConfigError
from recsys.flags import between
from recsys.package_flags import add_verify_key, package_folder, packaged_config


def folders(flags: argparse.Namespace) -> list[Path]:
    """Returns the folders of one package or two."""
    return [Path(folder) for folder in flags.package] or [package_folder(flags)]


def first_config(flags: argparse.Namespace) -> Path:
    """Returns the config of the first package."""
    first = argparse.Namespace(**{**vars(flags), "package": flags.package[0] if flags.package else None})
    return packaged_config(first)


def check(flags: argparse.Namespace, token: str | None) -> None:
    """Raises ConfigError for flags that do not go together."""
    if len(flags.package) > 2:
        raise ConfigError(f"--package: {len(flags.package)} packages are given; give one, or two to compare")
    if (flags.share is not None) != (len(flags.package) == 2):
        raise ConfigError(
            "--share: give it with two packages: the share of the users whom the second one answers"
        )
    if flags.user_store_folder_mib is not None and flags.user_store_folder is None:
        raise ConfigError("--user-store-folder-mib: it is for a folder; give --user-store-folder")
    if flags.item_names and not flags.page_rows:
        raise ConfigError("--item-names: it is for the page; give --page-rows, the rows of its users")
    if flags.page_rows and token is not None:
        raise ConfigError("--page-rows: a browser sends no token, so a server with a token has no page")


def user_store(flags: argparse.Namespace) -> pb.UserStore | None:
    """Returns the fields of a store of users that the flags set; None if they set none."""
    given = {"host_mib": flags.user_store_mib}
    if flags.user_store_folder is not None:
        given["disk"] = pb.UserFolder(folder=flags.user_store_folder, mib=flags.user_store_folder_mib)
    given = {name: value for name, value in given.items() if value is not None}
    return pb.UserStore(**given) if given else None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this command."""
    group = parser.add_argument_group("serve flags")
    group.add_argument(
        "--package",
        metavar="DIR",
        action="append",
        default=[],
        help="folder made by recsys.export (default: <run-dir>/export); twice to compare two, see --share",
    )
    add_verify_key(group)
    group.add_argument(
        "--share",
        metavar="SHARE",
        type=between(0, 1, float),
        help="share of the users whom the second package answers, such as 0.1",
    )
    group.add_argument(
        "--page-rows",
        metavar="PATH",
        nargs="+",
        default=[],
        help="parquet or .csv files of rows; a page at / shows what their users get",
    )
    group.add_argument("--item-names", metavar="FILE", help="columns `id` and `name` of items, for that page")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: this machine only)"
    )
    group.add_argument("--token-file", metavar="FILE", help="file with the token that requests must carry")
    group.add_argument("--token-env", metavar="NAME", help="environment variable that holds this token")
    _add_store_flags(group)
    for name, kind, default, least, about in (
        ("port", int, 8000, 0, "port to listen on; 0 picks a free one"),
        ("processes", int, 1, 1, "processes that score with a package, each with a copy of it"),
        ("max-wait-ms", float, 0.0, 0, "how long the first request of a batch waits for others"),
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
        most = {"port": 65_535, "processes": 256}.get(name, 10**9)
        group.add_argument(f"--{name}", type=between(least, most, kind), default=default, help=shown)


def _add_store_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--user-store-mib",
        metavar="MIB",
        type=between(1, 10**6, int),
        help="memory for encoded users, who are kept from request to request (default: as exported)",
    )
    group.add_argument(
        "--user-store-folder",
        metavar="DIR",
        help="folder for users who leave this memory (default: they are dropped)",
    )
    group.add_argument(
        "--user-store-folder-mib",
        metavar="MIB",
        type=between(1, 10**8, int),
        help="size of this folder (default: 16384)",
    )
