"""Exports checkpoints as packages, and predicts scores and recommendations with them."""
