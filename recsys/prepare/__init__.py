"""Makes training data from event logs and public data sets: `python -m recsys.prepare`."""
