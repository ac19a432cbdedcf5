"""Implements the tools of `recsys sid` and their flags."""

import argparse
from pathlib import Path

from recsys import files
from recsys.errors import ConfigError
from recsys.flags import Parser, positive
from recsys.prepare.command import require_free

PROGRAM = "python -m recsys.sid"

PAGE = "report.html"

MOST_LEVELS = 64
"""Most codes of an item; more would not be short."""


def embed(arguments: list[str] | None = None) -> None:
    """Turn the items of a data folder into vectors: from texts, from training events, or from a file."""
    flags = _parser("embed", embed)
    flags.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="a folder made by `recsys prepare`"
    )
    flags.add_argument(
        "--source", action="append", choices=("text", "cooc", "file"),
        help="source of vectors; may be repeated to join several (default: text and cooc)",
    )  # fmt: skip
    flags.add_argument(
        "--weight", action="append", type=_factor, help="weight of each --source, in order (default: 1)"
    )
    flags.add_argument("--items", type=Path, metavar="FILE", help="item table: .parquet, .csv or .jsonl")
    flags.add_argument("--item-column", help="column of ids in --items and --vectors (default: item_id)")
    flags.add_argument(
        "--text-column",
        action="append",
        help="column of --items with text; may be repeated (default: all columns)",
    )
    flags.add_argument("--text-encoder", choices=("tfidf", "minilm"), help="default: tfidf")
    flags.add_argument(
        "--vectors", type=Path, metavar="FILE", help="vectors for --source file: .parquet or .npy"
    )
    flags.add_argument(
        "--like",
        type=Path,
        metavar="DIR",
        help="a bundle or folder of vectors whose transform is applied to new items",
    )
    flags.add_argument("--seed", type=_seed, default=0, help="default: 0")
    options = flags.parse_args(arguments)
    _require_output(options, "data", "items", "vectors", "like")
    from recsys.sid import embeddings as store
    from recsys.sid.catalogue import ITEM, read_ids

    table = store.ItemTable(
        options.items, options.item_column or ITEM, tuple(options.text_column or ()), options.vectors
    )
    if options.like is not None:
        fixed = ("source", "weight", "text_encoder")
        given = [f"--{name.replace('_', '-')}" for name in fixed if getattr(options, name) is not None]
        if given:
            raise ConfigError(f"{given[0]}: --like takes it from {options.like}; leave it out")
        store.require_whole(
            options.like, "name a bundle or a folder of `recsys sid embed`", store.TRANSFORM_FILE
        )
        transform = store.Transform.read(options.like / store.TRANSFORM)
        ids = read_ids(options.data)
        made = store.Embeddings(ids, transform.apply(options.data, ids, table), transform)
    else:
        made = store.embed(options.data, _settings(options), table)
    store.write_embeddings(options.output, made)
    unknown = int((~made.vectors.any(1)).sum())
    print(
        f"{len(made.ids):,} items, {made.vectors.shape[1]} numbers each, {unknown:,} items without a vector"
    )
    print(f"next: {PROGRAM} fit --embeddings {options.output} --output {options.output}-bundle")


def _settings(options: argparse.Namespace):
    from recsys.sid.embeddings import Settings

    names = options.source or ["text", "cooc"]
    weights = options.weight or [1.0] * len(names)
    if len(set(names)) != len(names):
        raise ConfigError(f"--source {names}: give each source once")
    if len(weights) != len(names):
        raise ConfigError(f"{len(weights)} --weight for {len(names)} --source; give one each, or none")
    if options.vectors is not None and "file" not in names:
        raise ConfigError("--vectors has no effect without --source file")
    if options.text_encoder is not None and "text" not in names:
        raise ConfigError("--text-encoder has no effect without --source text")
    for name in ("items", "text_column"):
        if getattr(options, name) is not None and "text" not in names:
            raise ConfigError(f"--{name.replace('_', '-')} has no effect without --source text")
    return Settings(names, weights, options.text_encoder or "tfidf", options.seed)


def fit(arguments: list[str] | None = None) -> None:
    """Fit a quantizer on vectors and write a bundle: a short code for each item."""
    flags = _parser("fit", fit)
    flags.add_argument(
        "--embeddings", type=Path, required=True, metavar="DIR", help="a folder made by `recsys sid embed`"
    )
    flags.add_argument(
        "--quantizer", choices=("rq_kmeans", "rq_vae", "opq"), default="rq_kmeans", help="default: rq_kmeans"
    )
    flags.add_argument("--levels", type=positive, help="number of codes per item (default: 3; opq: 32)")
    flags.add_argument("--size", type=positive, default=256, help="number of values of a code (default: 256)")
    flags.add_argument(
        "--balanced",
        action="store_true",
        help="use codes evenly (Sinkhorn): rq_kmeans on all levels, rq_vae on the last",
    )
    flags.add_argument("--steps", type=positive, help="training steps of rq_vae (default: 10000)")
    flags.add_argument("--seed", type=_seed, default=0, help="default: 0")
    options = flags.parse_args(arguments)
    _require_output(options, "embeddings")
    from recsys.sid import bundle, page
    from recsys.sid.embeddings import hash_transform, read_embeddings

    vectors = read_embeddings(options.embeddings)
    if options.size > len(vectors.ids):
        raise ConfigError(
            f"--size {options.size}: more codes than the {len(vectors.ids):,} items; give fewer"
        )
    settings = _quantizer_settings(options)
    import torch

    from recsys.sid.quantizers import QUANTIZERS

    fitted = QUANTIZERS[options.quantizer].fit(torch.from_numpy(vectors.vectors), **settings)
    made = bundle.make_bundle(
        vectors, fitted, options.quantizer, hash_transform(options.embeddings), settings
    )
    bundle.write_bundle(options.output, made, options.embeddings)
    print("\n".join(page.lines(made)))
    print(f"next: {PROGRAM} report --bundle {options.output}")


def _quantizer_settings(options: argparse.Namespace) -> dict:
    settings = {"size": options.size, "seed": options.seed}
    settings["levels"] = options.levels or (32 if options.quantizer == "opq" else 3)
    if settings["levels"] > MOST_LEVELS:
        raise ConfigError(f"--levels {options.levels}: an item has at most {MOST_LEVELS} codes")
    if options.steps is not None and options.quantizer != "rq_vae":
        raise ConfigError(f"--steps has no effect on {options.quantizer}")
    if options.balanced and options.quantizer == "opq":
        raise ConfigError("--balanced has no effect on opq")
    if options.quantizer == "rq_kmeans":
        settings["balanced"] = options.balanced
    elif options.quantizer == "rq_vae":
        settings |= {"balanced_last": options.balanced, "steps": options.steps or 10_000}
    return settings


def report(arguments: list[str] | None = None) -> None:
    """Report how good the codes of a bundle are, as a table and as a page with charts."""
    flags = Parser(prog=f"{PROGRAM} report", description=report.__doc__, allow_abbrev=False)
    flags.add_argument(
        "--bundle", type=Path, required=True, metavar="DIR", help="a folder made by `recsys sid fit`"
    )
    flags.add_argument("--html", type=Path, metavar="FILE", help=f"the page (default: <bundle>-{PAGE})")
    options = flags.parse_args(arguments)
    from recsys.sid import bundle, page

    read = bundle.read_bundle(options.bundle)
    name = options.bundle.resolve().name
    # The page is not written into the bundle, because the bundle's manifest names every file.
    html = options.html or options.bundle.resolve().with_name(f"{name}-{PAGE}")
    if html.resolve().is_relative_to(options.bundle.resolve()):
        raise ConfigError(f"--html {html}: lies in the bundle and would damage it; name another place")
    files.write_text(html, page.build(read, name))
    print("\n".join(page.lines(read)))
    print(f"page: {html}")


def append(arguments: list[str] | None = None) -> None:
    """Give codes to new items with the frozen codebooks; codes of the bundle's items stay as they are."""
    flags = _parser("append", append)
    flags.add_argument(
        "--bundle", type=Path, required=True, metavar="DIR", help="a folder made by `recsys sid fit`"
    )
    flags.add_argument(
        "--embeddings",
        type=Path,
        required=True,
        metavar="DIR",
        help="vectors made by `recsys sid embed --like BUNDLE`",
    )
    options = flags.parse_args(arguments)
    # The bundle itself may be the output: it is replaced when the new one is complete.
    in_place = options.bundle.resolve() == options.output.resolve()
    _require_output(options, "embeddings", *([] if in_place else ["bundle"]))
    from recsys.sid import bundle
    from recsys.sid.embeddings import hash_transform, read_embeddings

    old = bundle.read_bundle(options.bundle)
    vectors = read_embeddings(options.embeddings)
    new = bundle.append_items(old, vectors, hash_transform(options.embeddings))
    bundle.write_bundle(options.output, new, options.bundle)
    added = len(new.ids) - len(old.ids)
    print(f"version {new.about.version}: {added:,} new items, {len(old.ids):,} old ones unchanged")


def _parser(tool: str, function) -> argparse.ArgumentParser:
    """Returns the parser of a tool that makes a folder."""
    flags = Parser(prog=f"{PROGRAM} {tool}", description=function.__doc__, allow_abbrev=False)
    flags.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to create")
    flags.add_argument("--overwrite", action="store_true", help="replace the output folder if it exists")
    return flags


def _require_output(options: argparse.Namespace, *inputs: str) -> None:
    """Checks that the output folder may be made and holds none of the inputs.

    Raises:
        ConfigError: the folder exists and --overwrite is off, or an input lies in it.
    """
    require_free(options.output, overwrite=options.overwrite)
    for name in inputs:
        path = getattr(options, name)
        if path is not None and path.resolve().is_relative_to(options.output.resolve()):
            raise ConfigError(
                f"--output {options.output} holds --{name} {path}, which would be lost; give another"
            )


def _seed(text: str) -> int:
    if not text.isdecimal() or not text.isascii() or len(text) > 10 or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 0 to {2**32 - 1}")
    return int(text)


def _factor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value
