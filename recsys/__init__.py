"""Generative recommenders on PyTorch: from event files and one `.config` to a model that serves.

Importing the package loads nothing else; `python -m recsys.train --config FILE` is the usual way in.
"""

__version__ = "0.1.0"
