"""`RankerDeclaration`: what configs must know about rankers before a model is built, without torch."""

from collections import Counter
from collections.abc import Iterator

from recsys import protos as pb
from recsys.config import fields
from recsys.config.checks.values import limit
from recsys.config.checks.walk import Finding
from recsys.config.declarations import ModelDeclaration, mixer_of
from recsys.config.registry import declare
from recsys.models.retriever_declaration import without_encoder

limit(pb.Ranker, required=("preprocessor", "mixer", "head", "tasks"))


@declare(pb.Ranker)
class RankerDeclaration(ModelDeclaration):
    """Declares `Ranker`, which scores candidates, as tokens of the sequence, for each task."""

    keeps_cache = True

    @property
    def history_reads_request_time(self) -> bool:
        """Whether the mixer reads times, tokens have ages, or the preprocessor is not one of ours."""
        mixer, preprocessor = mixer_of(self.pipeline), self.config.preprocessor
        if mixer is None or mixer.reads_times or not preprocessor.HasField("contextual"):
            return True
        return preprocessor.contextual.positional.num_time_buckets > 0

    def findings(self) -> Iterator[Finding]:
        """Checks that histories and candidates have features, and that each channel has its own stack."""
        features = self.pipeline.features
        for side, noun in ((pb.HISTORY, "history"), (pb.CANDIDATE, "candidates")):
            if features and not any(side in feature.sides for feature in features):
                name = pb.Side.Name(side)
                noun = (
                    f"no feature has the side {name}, so the {noun} would have no content; add {name} to one"
                )
                yield Finding("features", noun)
        yield from without_encoder(self.pipeline)
        yield from self._channels()

    def _channels(self) -> Iterator[Finding]:
        path = "model.ranker.preprocessor.contextual.channels"
        names = [channel.name for channel in self.config.preprocessor.contextual.channels]
        for index, name in enumerate(names):
            if name and Counter(names)[name] > 1:
                yield Finding(
                    f"{path}[{index}].name", f"{name!r} is the name of several channels; rename one"
                )
        chosen = fields.chosen(self.config.mixer)
        mixer = fields.name_of(chosen) if chosen is not None else None
        if names and mixer not in (None, "mixture"):
            yield Finding(
                path, f"mixer.{mixer} mixes one sequence; use mixer.mixture with one stack per channel"
            )
        if mixer != "mixture":
            return
        stacks = [stack.channel for stack in self.config.mixer.mixture.stacks]
        if stacks and stacks != names:
            stacked, wanted = (", ".join(map(repr, listed)) or "none" for listed in (stacks, names))
            problem = (
                f"the stacks are for {stacked}; {path} has {wanted}. Name the same channels in the same order"
            )
            yield Finding("model.ranker.mixer.mixture.stacks", problem)
