"""The library: everything that `import recsys` offers to notebooks and programs.

`config` reads a config, `build` makes a model, `batches` takes rows from a data frame, `fit` trains,
`evaluate` measures, `load` opens a run folder or a package. A `Model` answers with `score`, `recommend` and
`embeddings`. `prepare_events` turns a log of events into a config and rows. Nothing here needs files, a
process group or environment variables; what runs is the code of the commands.
"""

from recsys import environment

environment.import_torchrec_quietly()

from recsys.api.batches import Batches, batches  # noqa: E402
from recsys.api.configs import Config, config  # noqa: E402
from recsys.api.events import PreparedEvents, prepare_events  # noqa: E402
from recsys.api.fitting import Fit, evaluate, fit  # noqa: E402
from recsys.api.models import Model, build, load  # noqa: E402
from recsys.errors import ConfigError, DataError, RecsysError  # noqa: E402
from recsys.training.hooks import Hook  # noqa: E402

__all__ = [
    "Batches",
    "Config",
    "ConfigError",
    "DataError",
    "Fit",
    "Hook",
    "Model",
    "PreparedEvents",
    "RecsysError",
    "batches",
    "build",
    "config",
    "evaluate",
    "fit",
    "load",
    "prepare_events",
]
