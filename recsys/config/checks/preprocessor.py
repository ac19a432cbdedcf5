"""Checks the rules of preprocessors: content, actions, contextual tokens."""

from collections.abc import Iterator

from recsys import protos as pb
from recsys.config.checks.walk import Finding, descend, join
from recsys.config.feature_kinds import kinds


def _interleaved(pipeline: pb.Pipeline) -> Iterator[Finding]:
    for message, path in descend(pipeline.model, "model"):
        if not isinstance(message, pb.ContextualPreprocessor) or message.HasField("action"):
            continue
        if message.action_placement == pb.ContextualPreprocessor.INTERLEAVED:
            problem = (
                "INTERLEAVED makes a token of each action, and `action` is not set; set it, or use SUMMED"
            )
            yield Finding(f"{path}.action_placement", problem)


def _content(pipeline: pb.Pipeline) -> Iterator[Finding]:
    """The features of an item must be at least E wide for a slice, and at most E wide for padding."""
    items = [kind for kind in kinds(pipeline) if {pb.HISTORY, pb.CANDIDATE} & set(kind.feature.sides)]
    width, wanted = sum(kind.width for kind in items), pipeline.model.embedding_dim
    widths = f"the features of an item are {width} wide and model.embedding_dim is {wanted}"
    for message, path in descend(pipeline.model, "model"):
        if not isinstance(message, pb.ContextualPreprocessor):
            continue
        if message.HasField("content_slice") and width < wanted:
            yield Finding(f"{path}.content_slice", f"{widths}; use content_pad, or content")
        if message.HasField("content_pad") and width > wanted:
            yield Finding(f"{path}.content_pad", f"{widths}; use content_slice, or content")


def _user_features(pipeline: pb.Pipeline) -> Iterator[Finding]:
    """Parts that are made of USER features need such a feature."""
    if any(pb.USER in feature.sides for feature in pipeline.features):
        return
    for message, path in descend(pipeline.model, "model"):
        if isinstance(message, (pb.ContextualizedMlp, pb.JoinedContextualTokens)):
            yield Finding(path, "it is made of USER features, but no feature has this side; remove it")


def _actions(pipeline: pb.Pipeline) -> Iterator[Finding]:
    for message, path in descend(pipeline.model, "model"):
        if not isinstance(message, pb.ActionEncoder):
            continue
        for part in ("bit", "name"):
            seen: dict[object, int] = {}
            for index, bit in enumerate(message.bits):
                value = getattr(bit, part)
                if value in seen:
                    place = f"{path}.bits[{index}].{part}"
                    yield Finding(
                        place, f"{value!r} is also {part} of bits[{seen[value]}]; each needs its own"
                    )
                seen.setdefault(value, index)
        limits = message.watch_time_thresholds
        if any(low >= high for low, high in zip(limits, limits[1:], strict=False)):
            yield Finding(join(path, "watch_time_thresholds"), "they must increase")


def _concatenated(pipeline: pb.Pipeline) -> Iterator[Finding]:
    for message, path in descend(pipeline.model, "model"):
        if not isinstance(message, pb.ActionEncoder) or not message.HasField("concatenated"):
            continue
        if not message.bits and not message.watch_time_thresholds:
            problem = "there is neither a bit nor a threshold to concatenate; add some, or remove it"
            yield Finding(f"{path}.concatenated", problem)


RULES = (_interleaved, _content, _user_features, _actions, _concatenated)
