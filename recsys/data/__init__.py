"""From event files to batches: sources, the order of an epoch, checks, vocabularies and reader processes.

`loader.Loader` is the way in. Reader processes run `sources` -> `columns` and send numpy arrays; `collate`
makes the `batch.Batch` of them in the training process.
"""
