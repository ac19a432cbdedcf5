"""Mixers: stacks of layers in which the tokens of a sample see each other.

Every mixer is a `Mixer`, takes `(config, *, embedding_dim)` and maps a `JaggedSequence` to one with mixed
values. A token's result depends only on the tokens of its sample. To add a mixer, write a module here and a
line below.
`modules/mixer_declarations.py` describes mixers to configs without importing torch.
"""

from recsys.modules.mixers.base import Mixer
from recsys.modules.mixers.hstu import HstuMixer
from recsys.modules.mixers.hybrid import HybridMixer
from recsys.modules.mixers.linear import LinearMixer
from recsys.modules.mixers.mixture import MixtureMixer
from recsys.modules.mixers.sasrec import SasRecMixer

__all__ = ["HstuMixer", "HybridMixer", "LinearMixer", "Mixer", "MixtureMixer", "SasRecMixer"]
