"""Imports what processes that score need. The server that forks them imports this module, once for all."""

import gc
import importlib
import os
from contextlib import suppress

from recsys import environment

_COUNT_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Variable that makes PyTorch count GPUs without an initialisation of CUDA."""

_MODULES = ("recsys.serving.batch_scorer",)


def _import() -> None:
    before = os.environ.get(_COUNT_BY_NVML)
    os.environ[_COUNT_BY_NVML] = "1"
    try:
        environment.import_torchrec_quietly()
        for name in _MODULES:
            importlib.import_module(name)
    finally:
        del os.environ[_COUNT_BY_NVML]
        if before is not None:
            os.environ[_COUNT_BY_NVML] = before


# A process that scores repeats an import that fails, and tells the user why.
with suppress(Exception):
    _import()
# A collection in a fork would look at all of this, and copy its memory.
gc.collect()
gc.freeze()
