"""`python -m recsys.baseline`: measures baselines without training, on the rows and by the rule of a config.

For a model that searches items, the baselines are popularity, and directed and symmetric item-to-item
co-occurrence. For a model that scores candidates, they are the mean label of each item, and the mean of all.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from recsys import cli
from recsys.errors import ConfigError


def run(call: cli.Call) -> None:
    """Measure baselines without training on the validation or test rows."""
    # Heavy imports come late, because --help, --validate and --print-config need none of them.
    from recsys import environment

    environment.import_torchrec_quietly()
    from recsys.config.declarations import model_of
    from recsys.evaluation import baselines, item_means
    from recsys.evaluation.protocol import describe, protocol

    pipeline, split = call.pipeline, call.flags.split
    for name in ("train", split):
        if not pipeline.data.HasField(name):
            raise ConfigError(f"data.{name}: absent, so there is nothing to measure a baseline with")
    model = model_of(pipeline)
    table: list[dict[str, Any]] = []
    if model.item_feature is None:
        for result in item_means.measure(pipeline, split):
            table.append({"name": result.name, "metrics": result.metrics, "settings": result.settings})
    else:
        for result in baselines.measure(pipeline, split):
            settings = result.settings._asdict() if result.settings is not None else {}
            table.append({"name": result.name, "metrics": result.metrics, "settings": settings})
    if call.flags.json:
        print(json.dumps({"split": split, "protocol": protocol(pipeline), "baselines": table}, indent=1))
    else:
        print("\n".join(lines(table)))
        if settings := protocol(pipeline):
            print(f"protocol: {describe(settings)}")


def lines(table: Sequence[Mapping[str, Any]]) -> list[str]:
    """Formats the results as a table with one row per metric, followed by the settings that were chosen."""
    names = list(table[0]["metrics"])
    width = max(map(len, [*names, "metric"]))
    columns = [max(8, len(row["name"])) for row in table]
    heads = zip(table, columns, strict=True)
    text_lines = ["  ".join([f"{'metric':<{width}}", *(f"{row['name']:>{size}}" for row, size in heads)])]
    for name in names:
        values = [f"{row['metrics'][name]:>{size}.4f}" for row, size in zip(table, columns, strict=True)]
        text_lines.append("  ".join([f"{name:<{width}}", *values]))
    for row in table:
        if row["settings"]:
            chosen = ", ".join(f"{name} {value}" for name, value in row["settings"].items())
            text_lines.append(f"{row['name']}, chosen on validation rows: {chosen}")
    return text_lines


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this command."""
    parser.add_argument("--split", choices=["validation", "test"], default="test", help="default: test")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return cli.main("baseline", run, arguments, add_flags=add_flags)


if __name__ == "__main__":
    raise SystemExit(main())
