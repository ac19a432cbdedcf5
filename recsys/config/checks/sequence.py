"""Sizes of a model's sequences that its preprocessor decides: contextual tokens, and tokens per event."""

from recsys import protos as pb
from recsys.config.declarations import model_of


def num_contextual(pipeline: pb.Pipeline) -> int:
    """Tokens in front of each history: a given number, or one for each USER feature.

    Only a `ContextualPreprocessor` makes such tokens; a config that chooses no preprocessor is counted as if
    it had one, so that its other mistakes are described correctly.
    """
    preprocessor = model_of(pipeline).preprocessor
    if preprocessor is not None and not isinstance(preprocessor, pb.ContextualPreprocessor):
        return 0
    if preprocessor is not None and preprocessor.HasField("joined_contextual"):
        return preprocessor.joined_contextual.num_tokens
    return sum(pb.USER in feature.sides for feature in pipeline.features)


def tokens_per_event(pipeline: pb.Pipeline) -> int:
    """History tokens of each event: 2 when content and action are tokens of their own, else 1."""
    preprocessor = model_of(pipeline).preprocessor
    if not isinstance(preprocessor, pb.ContextualPreprocessor):
        return 1
    return 2 if preprocessor.action_placement == pb.ContextualPreprocessor.INTERLEAVED else 1
