"""Makes training data: parquet files, vocabularies and a starter config.

  csv        from any log of interactions, one line per event (csv, tsv, gz, parquet)
  sequences  from text files with one line per user: `user item item ...`
  movielens  from a MovieLens release (ml-1m, ml-10m, ml-latest-small, ...)
  kuairand   from KuaiRand-Pure or KuaiRand-1K
  cold-start from a folder of one of these, with items held out of training

`python -m recsys.prepare csv --help` lists the flags of the first, and so on. Exit codes: 2 usage, 3 data.
"""

from collections.abc import Sequence

from recsys.prepare import cold_start, command, csv, kuairand, movielens, sequences

TOOLS = {
    "csv": csv.main,
    "sequences": sequences.main,
    "movielens": movielens.main,
    "kuairand": kuairand.main,
    "cold-start": cold_start.main,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tool that the first argument names with the flags after it, and returns the exit code."""
    return command.run_tool(command.PROGRAM, __doc__, TOOLS, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
