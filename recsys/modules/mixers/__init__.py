"""Stacks of layers in which the tokens of a sample see each other.

Every mixer is a `Mixer`, takes `(config, *, embedding_dim)` and maps a `JaggedSequence` to one with mixed
values; a token's result depends on its own sample only. To add a mixer, write a module here and a line below.
What a config must know of a mixer without importing torch is in `modules/mixer_declarations.py`.
"""

from recsys.modules.mixers.base import Mixer
from recsys.modules.mixers.hstu import HstuMixer
from recsys.modules.mixers.mixture import MixtureMixer
from recsys.modules.mixers.sasrec import SasRecMixer

__all__ = ["HstuMixer", "Mixer", "MixtureMixer", "SasRecMixer"]
