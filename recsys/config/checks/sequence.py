"""Computes sizes of sequences that the preprocessor decides: contextual tokens, and tokens per event."""

from recsys import protos as pb
from recsys.config.declarations import model_of


def num_contextual(pipeline: pb.Pipeline) -> int:
    """Returns the number of contextual tokens: a number that the config gives, or one per USER feature.

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
    """Returns the history tokens per event: 2 if content and action are separate tokens, else 1."""
    preprocessor = model_of(pipeline).preprocessor
    if not isinstance(preprocessor, pb.ContextualPreprocessor):
        return 1
    return 2 if preprocessor.action_placement == pb.ContextualPreprocessor.INTERLEAVED else 1
