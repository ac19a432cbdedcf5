"""Reads event files and makes batches of their rows.

`loader.Loader` is the way in. The stages import in this direction only: `schema` (columns and vocabularies),
`sources` (files and row groups), `plan` (the order of an epoch), `convert` (checked numpy arrays), `workers`
(reader processes), and then `collator`, which makes a `batch.Batch` of the arrays in the training process.
"""
