"""Sizes of a model's sequences that its config decides: contextual tokens, and tokens of an event."""

from recsys import protos as pb


def num_contextual(pipeline: pb.Pipeline) -> int:
    """Tokens in front of each history: one a USER feature or a given number for a ranker, else none."""
    if not pipeline.model.HasField("ranker"):
        return 0
    contextual = pipeline.model.ranker.preprocessor.contextual
    if contextual.HasField("joined_contextual"):
        return contextual.joined_contextual.num_tokens
    return sum(pb.USER in feature.sides for feature in pipeline.features)


def tokens_per_event(pipeline: pb.Pipeline) -> int:
    """History tokens of each event: 2 when content and action are tokens of their own, else 1."""
    contextual = pipeline.model.ranker.preprocessor.contextual
    return 2 if contextual.action_placement == pb.ContextualPreprocessor.INTERLEAVED else 1
