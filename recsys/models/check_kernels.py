"""Asks the ops, before anything is built, which attention kernels a config will run.

A model's class names the ops that it will call (`Model.kernels`). An op answers from static facts, which
follow from the resolved config and the device.
"""

from collections.abc import Iterator

from recsys import protos as pb
from recsys.config import checks, registry
from recsys.config.checks.walk import Finding
from recsys.errors import ConfigError
from recsys.modules.mixers.base import AttentionUse


def check_kernels(pipeline: pb.Pipeline, device: str) -> None:
    """Checks that all backends in a resolved config can run on a device, `cpu` or `cuda`.

    Raises:
        ConfigError: lists every finding.
    """
    findings = []
    for use in _uses(pipeline, device):
        try:
            use.op.select(use.facts, use.backend)
        except ValueError as error:
            findings.append(Finding(f"{use.path}.backend", str(error)))
    if findings:
        raise ConfigError(checks.lines(dict.fromkeys(findings), {}))


def describe_kernels(pipeline: pb.Pipeline, device: str) -> list[str]:
    """Returns lines on which backend each attention op runs, and why it does not run another."""
    lines: dict[str, None] = {}
    for op, path, backend, facts in _uses(pipeline, device):
        chosen = op.select(facts, backend).__name__.rpartition(".")[2]
        why = str(op.explain(facts)).partition("\n")[2]
        sort = f"{facts.device}, {str(facts.dtype).removeprefix('torch.')}, {path}.backend: {backend}"
        lines[f"kernel of {op.name}: {chosen} ({sort})\n{why}"] = None
    return list(lines)


def _uses(pipeline: pb.Pipeline, device: str) -> Iterator[AttentionUse]:
    model = registry.pick(pipeline.model)
    return model.cls.kernels(model.config, pipeline, device)
