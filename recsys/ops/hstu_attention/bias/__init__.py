"""Relative bias of `hstu_attention`: preparation, kernels, and the gradients of its tables."""
