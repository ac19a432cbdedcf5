"""Imports what processes that score need. The server that forks them imports this module, once for all."""

import gc
import importlib
from contextlib import suppress

from recsys import environment

# A process that scores repeats an import that fails, and tells the user why.
with suppress(Exception):
    environment.import_torchrec_quietly()
    importlib.import_module("recsys.serving.batch_scorer")
# A collection in a fork would look at all of this, and copy its memory.
gc.collect()
gc.freeze()
