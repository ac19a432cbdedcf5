"""Generative recommenders on PyTorch: from event files and one `.config` to a model that serves.

There are two ways in: commands such as `python -m recsys.train --config FILE`, and the functions below, for
notebooks and programs. Importing the package loads nothing else; a name is imported when it is first used.

    import recsys

    data = recsys.prepare_events(events, user="user", item="item", time="time")
    model = recsys.build(data.config)
    recsys.fit(model, data.train, validation=data.validation)
    model.recommend(data.latest, k=10)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recsys.api import (
        Batches,
        Config,
        ConfigError,
        DataError,
        Fit,
        Hook,
        Model,
        PreparedEvents,
        RecsysError,
        batches,
        build,
        config,
        evaluate,
        fit,
        load,
        prepare_events,
    )

__version__ = "0.1.0"

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

_CALLABLE_MODULES = ("config", "evaluate")
"""Names that are modules too; see `recsys.callable_module`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _CALLABLE_MODULES:
        return import_module(f"{__name__}.{name}")
    return getattr(import_module(f"{__name__}.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
