"""Stacks of layers in which tokens see each other.

Each takes `(config, *, embedding_dim)` and maps a `JaggedSequence` to one with mixed values; what a token
becomes depends on its own sample only. `flops(layout)` counts what that costs. A new one is a module here and
a line below.
"""

from recsys.modules.mixers.hstu import HstuMixer
from recsys.modules.mixers.mixture import MixtureMixer
from recsys.modules.mixers.sasrec import SasRecMixer

__all__ = ["HstuMixer", "MixtureMixer", "SasRecMixer"]
