"""Makes training data from logs and public data sets: `python -m recsys.prepare TOOL`.

The modules `csv`, `sequences`, `movielens` and `kuairand` are the tools; their docstrings are the text of
`--help`, and `command` runs them. `text_tables` and `sequence_files` read text, `events` cuts a log of any
size into parts, `rows` cuts requests and histories, `dataset_writer` writes parquet, and `starter_config`
writes the config that trains on the result.
"""
