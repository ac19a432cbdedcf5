"""Evaluates a run with its embedding tables as trained, in INT8 and in INT4, as a package stores them.

    python experiments/2026-11-28-package-tables/quantization.py RUN_FOLDER [SPLIT]

Prints the metrics and the largest error of a looked-up number in steps of its row, which rounding bounds by 0.5.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import recsys.config as config
from recsys import environment
from recsys import protos as pb

environment.import_torchrec_quietly()

from recsys.data.loader import Loader  # noqa: E402
from recsys.inference.mapped_tables import write_tables  # noqa: E402
from recsys.models import layout_rule  # noqa: E402
from recsys.training import checkpoint, evaluator  # noqa: E402
from recsys.training.stored_table import load_model  # noqa: E402

LEVELS = {pb.ExportTables.INT8: 256, pb.ExportTables.INT4: 16}


def main(run: Path, split: str) -> None:
    """Prints a line for each number type."""
    pipeline = config.prepare(run / config.FILE_NAME, ["export.tables.memory_map_above_bytes=0"]).pipeline
    model, tables = load_model(checkpoint.find(run / "checkpoints", "best"), pipeline)
    for dtype in (0, *LEVELS):
        with tempfile.TemporaryDirectory() as folder:
            mapped = write_tables(Path(folder), tables, dtype)
            model.embed.outside.look_ups = {name: table.look_up for name, table in mapped.items()}
            loader = Loader.open(pipeline, split, layout_rule(pipeline), mode="evaluate")
            metrics = evaluator.evaluate(model, loader, torch.device("cpu"))
            errors = [error_in_steps(tables[n], mapped[n], LEVELS.get(dtype, 2)) for n in mapped]
        name = pb.ExportTables.Dtype.Name(dtype) if dtype else "as trained"
        shown = "  ".join(f"{metric} {value:.5f}" for metric, value in metrics.items())
        print(f"{name}: {shown}  largest error {max(errors):.3f} steps", flush=True)


def error_in_steps(trained, mapped, levels: int) -> float:
    """Returns the largest |trained - mapped| / ((max - min) / (levels - 1)) of a table, per row."""
    rows = torch.arange(trained.rows)
    exact, stored = (table.look_up(rows).double().numpy() for table in (trained, mapped))
    step = (exact.max(1, keepdims=True) - exact.min(1, keepdims=True)) / (levels - 1)
    return float((np.abs(stored - exact) / np.maximum(step, 1e-30))[step[:, 0] > 0].max(initial=0))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "test")
