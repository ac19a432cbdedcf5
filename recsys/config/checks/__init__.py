"""Rules of a config: `values` of single fields, and what `data`, `model`,
`preprocessor`, `train` and `export` say across fields.

Below `config`. A rule is a function from a resolved Pipeline to findings; it must also stand a config that
makes no sense elsewhere, since all findings are reported at once. To add one, write it in its module and name
it in that module's `RULES`. `effects` holds warnings.
"""

from collections.abc import Collection

from recsys import protos as pb
from recsys.config.checks import (
    channels,
    data,
    effects,
    export,
    model,
    preprocessor,
    retriever,
    train,
    values,
)
from recsys.config.checks.model import loss_kind, metric_names
from recsys.config.checks.sequence import num_contextual, tokens_per_event
from recsys.config.checks.walk import Finding, children, join, lines

__all__ = [
    "Finding",
    "children",
    "device_findings",
    "findings",
    "join",
    "lines",
    "loss_kind",
    "metric_names",
    "num_contextual",
    "retriever_findings",
    "tokens_per_event",
    "warnings",
]

RULES = (
    *values.RULES,
    *data.RULES,
    *model.RULES,
    *retriever.RULES,
    *preprocessor.RULES,
    *channels.RULES,
    *train.RULES,
    *export.RULES,
)


def findings(pipeline: pb.Pipeline, derived: Collection[str] = ()) -> list[Finding]:
    """What is wrong with a resolved config; empty when it can be built.

    Args:
        derived: paths of fields that were filled in; of these numbers only the origin is judged.
    """
    numbers = [finding for finding in values.numbers(pipeline) if finding.path not in derived]
    return numbers + [finding for rule in RULES for finding in rule(pipeline)]


def retriever_findings(pipeline: pb.Pipeline) -> list[Finding]:
    """Why the retriever of a resolved config cannot be trained."""
    rules = (model.fits_preprocessor, *retriever.RULES)
    return [finding for rule in rules for finding in rule(pipeline)]


def warnings(pipeline: pb.Pipeline) -> list[Finding]:
    """What a config as written (not resolved) says without effect, or with one that surprises."""
    return [finding for rule in effects.RULES for finding in rule(pipeline)]


def device_findings(pipeline: pb.Pipeline, device: str) -> list[Finding]:
    """What a resolved config asks for and a device, `cpu` or `cuda`, cannot do."""
    return list(train.device(pipeline, device))
