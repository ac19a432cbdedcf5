"""Compares a config with the files that it names, without reading a row, for the flag `--validate`."""

from typing import NamedTuple

from recsys import protos as pb
from recsys.config.checks import lines
from recsys.config.checks.effects import behind_the_end
from recsys.data.filesystems import open_filesystem
from recsys.data.pretrained_rows import pretrained_tables
from recsys.data.sources import Source, open_source
from recsys.errors import DataError

SPLITS = ("train", "validation", "test")


class FileFindings(NamedTuple):
    """Faults and warnings, one line each; a fault keeps a command from running."""

    faults: list[str]
    warnings: list[str]


def compare_with_files(pipeline: pb.Pipeline, locations: dict[str, str] | None = None) -> FileFindings:
    """Finds columns that are missing or wrong in the files of each split, settings that take effect only
    after the last step, and unusable files of pretrained vectors and addresses of checkpoints.

    Files that cannot be opened cause a warning, because a config may be checked on a machine without its
    data.

    Args:
        pipeline: resolved.
        locations: line of the config file of each field, by field path, as `config.read` returns it.
    """
    faults: list[str] = []
    warnings: list[str] = []
    for split in SPLITS:
        if not pipeline.data.HasField(split):
            continue
        try:
            source = open_source(getattr(pipeline.data, split), pipeline)
        except DataError as error:
            warnings.append(f"data.{split}: its columns were not checked: {error}")
            continue
        try:
            source.check(pipeline, "train" if split == "train" else "evaluate")
        except DataError as error:
            told = [f"data.{split}: {line}" for line in str(error).splitlines()]
            # The last line lists all columns; once is enough.
            faults += told[:-1] if faults else told
        if split == "train" and pipeline.train.HasField("num_epochs"):
            warnings += lines(list(behind_the_end(pipeline, _steps(pipeline, source))), locations or {})
    try:
        pretrained_tables(pipeline)
        if pipeline.train.checkpoint.copy_to:
            open_filesystem(pipeline.train.checkpoint.copy_to)
    except DataError as error:
        faults.append(str(error))
    return FileFindings(faults, warnings)


def _steps(pipeline: pb.Pipeline, source: Source) -> int:
    """Returns the steps of a run of epochs in one process; several processes make fewer."""
    batches = -(-source.num_rows // pipeline.data.batch_size) * pipeline.train.num_epochs
    return batches // pipeline.train.accumulate_batches
