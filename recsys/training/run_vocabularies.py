"""Keeps copies of a run's vocabularies in its folder, and finds them again for a later run.

A later preparation of the data may replace a vocabulary file. A run that starts from this one still has to
know which id each row of a table stood for.
"""

import logging
from pathlib import Path

import fsspec

from recsys import files
from recsys import protos as pb
from recsys.config.feature_kinds import FeatureKind
from recsys.data.schema.vocabulary import digest_of, embedded_features
from recsys.errors import DataError

FOLDER = "vocabulary"
"""Name of the folder of the copies, in the run folder."""

log = logging.getLogger(__name__)


def keep(pipeline: pb.Pipeline, folder: Path) -> None:
    """Copies the vocabulary files of a resolved config into a run folder, unless it has them already.

    Raises:
        OSError: a file cannot be read or written.
    """
    for table, kind in embedded_features(pipeline).items():
        path, file = folder / FOLDER / f"{table}.parquet", kind.vocabulary and kind.vocabulary.file
        if not file or path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.partial")
        with fsspec.open(file, "rb") as source, aside.open("wb") as target:
            while block := source.read(1 << 24):
                target.write(block)
        files.publish(aside, path)


def find(table: str, kind: FeatureKind, fingerprint: str, folder: Path) -> str:
    """Returns the vocabulary file of a table of an earlier run.

    Args:
        table: name of the table.
        kind: the kind of a feature of the table, of the config of the earlier run.
        fingerprint: the table's entry in `Inputs.vocabularies` of the earlier run.
        folder: folder of the earlier run.

    Raises:
        DataError: neither the run folder nor the path in the config has the file with this fingerprint.
    """
    places = [str(folder / FOLDER / f"{table}.parquet"), kind.vocabulary.file if kind.vocabulary else ""]
    for place in places:
        try:
            with fsspec.open(place, "rb") as file:
                if files.sha256(file) == digest_of(fingerprint):
                    return place
        except (OSError, ValueError) as error:
            log.debug("%s: %s", place, error)
    raise DataError(
        f"the vocabulary of {table} with which {folder} was trained is neither {places[0]} nor {places[1]}, "
        "so nobody knows which ids its rows stand for. Restore the file"
    )
