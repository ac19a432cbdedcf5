"""Building blocks of models: single-device PyTorch modules, one concept per file."""
