"""Scores batches with a trained model: in one pass, with a cache, or by CUDA graphs."""
