"""Checks the rules that a config must follow: single fields in `values`; rules across fields in `data`,
`model`, `preprocessor`, `train` and `export`; warnings in `effects`.

This package stands below `config`. A rule is a function from a resolved Pipeline to findings. It must not
fail on a config that is wrong elsewhere, because all findings are reported at once. To add a rule, write it
in its module and name it in that module's `RULES`. Rules of one family of models or of one mixer belong in
its declaration (`config.declarations`).
"""

from collections.abc import Collection

from recsys import protos as pb
from recsys.config.checks import (
    data,
    effects,
    export,
    model,
    preprocessor,
    train,
    values,
)
from recsys.config.checks.choices import loss_kind
from recsys.config.checks.model import fits_preprocessor, metric_names
from recsys.config.checks.sequence import num_contextual, tokens_per_event
from recsys.config.checks.walk import Finding, children, join, lines
from recsys.config.declarations import mixer_of, model_of

__all__ = [
    "Finding",
    "children",
    "device_findings",
    "family_findings",
    "findings",
    "join",
    "library_findings",
    "lines",
    "loss_kind",
    "metric_names",
    "num_contextual",
    "tokens_per_event",
    "warnings",
]

RULES = (
    *values.RULES,
    *data.RULES,
    *model.RULES,
    *preprocessor.RULES,
    *train.RULES,
    *export.RULES,
)


def findings(pipeline: pb.Pipeline, derived: Collection[str] = ()) -> list[Finding]:
    """Returns the faults of a resolved config; the list is empty if the config can be built.

    Args:
        derived: paths of fields that were filled in; their values are checked at their origin.
    """
    mixer_of(pipeline)  # declarations of the model and its mixer may add ranges
    numbers = [finding for finding in values.numbers(pipeline) if finding.path not in derived]
    return numbers + [finding for rule in RULES for finding in rule(pipeline)]


def family_findings(pipeline: pb.Pipeline) -> list[Finding]:
    """Returns the faults that keep a model from being built, for models that are built without a command."""
    return [*fits_preprocessor(pipeline), *model_of(pipeline).findings()]


def warnings(pipeline: pb.Pipeline) -> list[Finding]:
    """Returns warnings about settings of a config, as written, that have no effect or a surprising one."""
    return [finding for rule in effects.RULES for finding in rule(pipeline)]


def device_findings(pipeline: pb.Pipeline, device: str) -> list[Finding]:
    """Returns findings about settings of a resolved config that a device, `cpu` or `cuda`, does not
    support."""
    return list(train.device(pipeline, device))


def library_findings(pipeline: pb.Pipeline) -> list[Finding]:
    """Returns findings about settings that need a library for training that is not installed."""
    return list(train.libraries(pipeline))
