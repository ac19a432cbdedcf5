"""Evaluates baselines that need no trained model, on the rows, by the rule and with the metrics of a config.

`baselines.measure` fits popularity and item-to-item co-occurrence to the training rows of a retriever.
"""
