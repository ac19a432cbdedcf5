"""The attention kernels that a config will run, asked of the ops before anything is built.

An op answers from static facts, all of which a resolved config and the device decide.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from recsys import protos as pb
from recsys.config import checks
from recsys.config.checks.walk import Finding, descend
from recsys.errors import ConfigError
from recsys.modules.mixers.rules import layer_rules
from recsys.ops.attention_args import AttentionFacts
from recsys.ops.hstu_attention import OP as HSTU_ATTENTION
from recsys.ops.runtime.dispatch import Op
from recsys.ops.softmax_attention import OP as SOFTMAX_ATTENTION


class Attention(NamedTuple):
    """The attention of some layers.

    Attributes:
        op: that computes it.
        path: of the mixer in the config.
        backend: that the config asks for.
        facts: by which the op chooses.
    """

    op: Op
    path: str
    backend: str
    facts: AttentionFacts


def check_kernels(pipeline: pb.Pipeline, device: str) -> None:
    """Refuse a resolved config that names a backend which cannot run on a device, `cpu` or `cuda`.

    Raises:
        ConfigError: with every finding.
    """
    findings = []
    for attention in _attentions(pipeline, device):
        try:
            attention.op.select(attention.facts, attention.backend)
        except ValueError as error:
            findings.append(Finding(f"{attention.path}.backend", str(error)))
    if findings:
        raise ConfigError(checks.lines(dict.fromkeys(findings), {}))


def describe_kernels(pipeline: pb.Pipeline, device: str) -> list[str]:
    """Lines that say which backend each kind of attention takes, and why not another one."""
    found: dict[str, None] = {}
    for op, path, backend, facts in _attentions(pipeline, device):
        chosen = op.select(facts, backend).__name__.rpartition(".")[2]
        why = str(op.explain(facts)).partition("\n")[2]
        sort = f"{facts.device}, {str(facts.dtype).removeprefix('torch.')}, {path}.backend: {backend}"
        found[f"kernel of {op.name}: {chosen} ({sort})\n{why}"] = None
    return list(found)


def _attentions(pipeline: pb.Pipeline, device: str) -> Iterator[Attention]:
    for mixer, path in descend(pipeline.model, "model"):
        if isinstance(mixer, pb.HstuMixer):
            for facts in _hstu(mixer, pipeline.model, device):
                yield Attention(HSTU_ATTENTION, path, mixer.backend, facts)
        if isinstance(mixer, pb.SasRecMixer):
            for facts in _sasrec(mixer, pipeline.model, device):
                yield Attention(SOFTMAX_ATTENTION, path, "auto", facts)


def _hstu(mixer: pb.HstuMixer, model: pb.Model, device: str) -> Iterator[AttentionFacts]:
    given = mixer.deterministic if mixer.HasField("deterministic") else None
    for mask in dict.fromkeys(rule.mask for rule in layer_rules(mixer)):
        yield AttentionFacts(
            device=device,
            dtype=_dtype(model),
            num_heads=mixer.num_heads,
            qk_dim=mixer.qk_dim,
            v_dim=mixer.v_dim,
            mask=mask,
            has_bias=mixer.HasField("bias"),
            needs_grad=True,
            deterministic=torch.are_deterministic_algorithms_enabled() if given is None else given,
        )


def _sasrec(mixer: pb.SasRecMixer, model: pb.Model, device: str) -> Iterator[AttentionFacts]:
    width = model.embedding_dim // mixer.num_heads
    for mask in dict.fromkeys(rule.mask for rule in layer_rules(mixer)):
        yield AttentionFacts(
            device=device,
            dtype=_dtype(model),
            num_heads=mixer.num_heads,
            qk_dim=width,
            v_dim=width,
            mask=mask,
            needs_grad=True,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )


def _dtype(model: pb.Model) -> torch.dtype:
    return torch.bfloat16 if model.precision == pb.BF16 else torch.float32
