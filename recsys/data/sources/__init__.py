"""Sources of rows, each registered under its message. A new one: its file, and one line here."""

from recsys.data.sources.base import File, Source, open_source
from recsys.data.sources.csv import CsvSource
from recsys.data.sources.parquet import ParquetSource
from recsys.data.sources.synthetic import SyntheticSource

__all__ = ["CsvSource", "File", "ParquetSource", "Source", "SyntheticSource", "open_source"]
