"""Records an evaluation of a run: metrics with their protocol, the report, and tracking services."""

import json
import logging
from pathlib import Path

from recsys import files
from recsys import protos as pb
from recsys.evaluation.protocol import describe, protocol
from recsys.training.hooks.report_tested import update_report
from recsys.training.run import Evaluation, tell_hooks

log = logging.getLogger("recsys.evaluate")


def record(result: Evaluation, pipeline: pb.Pipeline, folder: Path, split: str) -> None:
    """Writes `<split>_metrics.json`, updates `report.html`, and tells the hooks of the config.

    Raises:
        RecsysError: the disk is full.
    """
    path, settings = folder / f"{split}_metrics.json", protocol(pipeline)
    content = {
        "checkpoint": result.checkpoint.name,
        "metrics": {name: value if value == value else None for name, value in result.metrics.items()},
        **result.counts._asdict(),
        "protocol": settings,
    }
    with files.naming_full_disk(folder):
        files.write_text(path, json.dumps(content, indent=1))
        update_report(folder / "report.html")
    tell_hooks(pipeline, folder, split, result)
    if settings:
        log.info("protocol: %s", describe(settings))
    log.info("%s on %s rows: %s", result.checkpoint.name, split, path)
