"""Scores batches with a trained model: in one pass or with a cache of users and histories."""
