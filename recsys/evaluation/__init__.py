"""Evaluates without a trained model: baselines on the rows of a config, by its rule and with its metrics.

`baselines.measure` fits popularity and item-to-item co-occurrence to the training rows of a retriever.
"""
