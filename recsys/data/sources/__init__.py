"""Sources of rows, each registered under its message. A new source needs a file and one line here."""

from recsys.data.sources.base import File, RowGroup, Source, open_source
from recsys.data.sources.csv import CsvSource
from recsys.data.sources.parquet import ParquetSource
from recsys.data.sources.synthetic import SyntheticSource

__all__ = ["CsvSource", "File", "ParquetSource", "RowGroup", "Source", "SyntheticSource", "open_source"]
