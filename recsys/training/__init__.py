"""Trains and evaluates models: the loop, optimizers, checkpoints, distributed runs and hooks."""
