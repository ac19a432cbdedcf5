"""Rules of a history in several channels: a stack for each, a channel for each stack."""

from collections import Counter
from collections.abc import Iterator

from recsys import protos as pb
from recsys.config.checks.walk import Finding


def _channels(pipeline: pb.Pipeline) -> Iterator[Finding]:
    ranker = pipeline.model.ranker
    path = "model.ranker.preprocessor.contextual.channels"
    names = [channel.name for channel in ranker.preprocessor.contextual.channels]
    for index, name in enumerate(names):
        if name and Counter(names)[name] > 1:
            yield Finding(f"{path}[{index}].name", f"{name!r} is the name of several channels; rename one")
    mixer = ranker.mixer.WhichOneof("mixer")
    if names and mixer not in (None, "mixture"):
        yield Finding(path, f"mixer.{mixer} mixes one sequence; use mixer.mixture with a stack a channel")
    if mixer != "mixture":
        return
    stacks = [stack.channel for stack in ranker.mixer.mixture.stacks]
    if stacks and stacks != names:
        given, wanted = (", ".join(map(repr, some)) or "none" for some in (stacks, names))
        yield Finding(
            "model.ranker.mixer.mixture.stacks",
            f"the stacks are for {given}; {path} has {wanted}. Name the same channels in the same order",
        )


def _of_retriever(pipeline: pb.Pipeline) -> Iterator[Finding]:
    if pipeline.model.retriever.mixer.HasField("mixture"):
        what = "mixes what several channels say of a candidate, and a retriever has no candidates; use hstu"
        yield Finding("model.retriever.mixer.mixture", what)


RULES = (_channels, _of_retriever)
