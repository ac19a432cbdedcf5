"""Parts that models are made of: single-device PyTorch modules, one idea a file."""
