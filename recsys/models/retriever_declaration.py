"""`RetrieverDeclaration`: what configs must know about retrievers before a model is built, without torch.

Next-item training makes every position of a history a query for the item after it, so the rules here reject
masks, positions and times that would reveal later events to a position.
"""

from collections.abc import Iterator

from recsys import protos as pb
from recsys.config.checks.values import limit
from recsys.config.checks.walk import Finding, descend
from recsys.config.declarations import (
    Choice,
    LossField,
    MetricList,
    ModelDeclaration,
    SeenRule,
    WeightColumn,
    mixer_of,
)
from recsys.config.registry import declare
from recsys.config.textproto import did_you_mean

limit(pb.Retriever, required=("item_feature", "preprocessor", "mixer", "loss"))

_ENCODER = "model.retriever.item_encoder"


class NextItemDeclaration(ModelDeclaration):
    """Declares what all families that are trained to find the next item of a history have in common."""

    has_targets = False
    may_change = ("metrics", "seen", "repeated_targets", "weight_column")
    weight_sides = (pb.USER, pb.HISTORY)

    @property
    def item_feature(self) -> str:
        """The name of the feature whose items are searched."""
        return self.config.item_feature

    @property
    def seen_rule(self) -> SeenRule:
        """The rule for items that a row has seen."""
        left_out = self.config.repeated_targets == pb.Retriever.LEAVE_OUT
        return SeenRule(self.config.seen == pb.Retriever.REMOVE, left_out)

    @property
    def protocol(self) -> dict[str, str]:
        """The rule for seen items and, if the mixer reads times, the time that a query knows."""
        rule, uih, mixer = self.seen_rule, self.config.preprocessor.uih, mixer_of(self.pipeline)
        settings = {"seen": pb.Retriever.Seen.Name(self.config.seen)}
        if rule.removed:
            settings["repeated_targets"] = pb.Retriever.RepeatedTargets.Name(self.config.repeated_targets)
        if mixer is not None and mixer.reads_times:
            settings["query_time"] = pb.UihPreprocessor.QueryTime.Name(uih.query_time)
        return settings

    def reads_candidates(self, mode: str) -> bool:
        """Returns True for evaluation only, where candidates are the items to find."""
        return mode == "evaluate"

    def weight_columns(self) -> list[WeightColumn]:
        """Returns the weight column of the next-item loss, if the config names one."""
        column = self.config.weight_column
        return [WeightColumn(column, f"{self.path}.weight_column")] if column else []

    def metrics(self) -> list[MetricList]:
        """Returns the metrics, which measure the ranks of the items to find."""
        return [MetricList(self.config.metrics, self.path, "", "retrieval")]

    def choices(self) -> Iterator[Choice]:
        """Derives the rule for seen items, the origin of positions, and what contextual tokens read."""
        yield from self._seen()
        origin = "next-item training"
        for message, path in descend(self.config, self.path):
            if isinstance(message, pb.PositionalEncoder):
                yield Choice(message, path, "origin", pb.PositionalEncoder.START, origin)
            if isinstance(message, pb.AttentionMask):
                yield Choice(message, path, "contextual_reads_history", False, origin)

    def findings(self) -> Iterator[Finding]:
        """Checks the item feature, contextual tokens, and what a position may see."""
        if self.config.mixer.HasField("mixture"):
            problem = f"combines channels for each candidate, and a {self.kind} has no candidates; use hstu"
            yield Finding(f"{self.path}.mixer.mixture", problem)
        yield from self._item()
        yield from without_encoder(self.pipeline)
        for index, feature in enumerate(self.pipeline.features):
            if pb.USER in feature.sides:
                problem = f"USER features have no place in the history of a {self.kind}; remove the side"
                yield Finding(f"features[{index}].sides", problem)
        yield from self._leaks()

    def warnings(self) -> Iterator[Finding]:
        """Yields settings without effect, and a rule for seen items that differs between the two fields."""
        for message, path in descend(self.config, self.path):
            if not isinstance(message, pb.AttentionMask):
                continue
            problem = f"without effect: a {self.kind} has no targets in its sequence"
            if message.target_window:
                yield Finding(f"{path}.target_window", problem)
            if message.target_group_size > 1:
                yield Finding(f"{path}.target_group_size", problem)
        removed, predict = self.seen_rule.removed, self.pipeline.predict
        if self.config.HasField("seen") and predict.HasField("remove_history"):
            if removed != predict.remove_history:
                said = f"{str(predict.remove_history).lower()} is given, {self.path}.seen says otherwise"
                problem = f"{said}: evaluation then does not measure these predictions; remove it"
                yield Finding("predict.remove_history", problem)
        mixer, timed = mixer_of(self.pipeline), self._postprocessor_reads_times
        if self.config.preprocessor.uih.query_time == pb.UihPreprocessor.LAST_EVENT:
            if mixer is not None and not mixer.reads_times and not timed:
                problem = "without effect: neither mixer nor postprocessor reads times"
                yield Finding(f"{self.path}.preprocessor.uih.query_time", problem)
        if self.config.repeated_targets == pb.Retriever.LEAVE_OUT and not removed:
            yield Finding(f"{self.path}.repeated_targets", "without effect: seen KEEP removes no target")

    @property
    def _postprocessor_reads_times(self) -> bool:
        return False

    @property
    def _encodes_items(self) -> bool:
        return False

    def _seen(self) -> Iterator[Choice]:
        """Derives one rule for evaluation and prediction from whichever of the two fields the config sets."""
        predict = self.pipeline.predict
        if predict.HasField("remove_history") and not predict.remove_history:
            yield Choice(self.config, self.path, "seen", pb.Retriever.KEEP, "predict.remove_history")
        removed = self.config.seen == pb.Retriever.REMOVE
        yield Choice(predict, "predict", "remove_history", removed, f"{self.path}.seen")

    def _item(self) -> Iterator[Finding]:
        pipeline, name = self.pipeline, self.config.item_feature
        by_name = {feature.name: (index, feature) for index, feature in enumerate(pipeline.features)}
        if name and name not in by_name:
            hint = did_you_mean(name, by_name)
            yield Finding(f"{self.path}.item_feature", f"no feature is called {name!r}. {hint}")
        if name not in by_name:
            return
        index, item = by_name[name]
        path, who = f"features[{index}]", f"it is the item of the {self.kind}"
        if not item.id.HasField("vocabulary"):
            yield Finding(path, f"{who}, whose catalogue is a vocabulary; use id {{ vocabulary {{}} }}")
        width = pipeline.model.embedding_dim
        if item.HasField("id") and not self._encodes_items and item.id.embedding_dim != width:
            problem = (
                f"{item.id.embedding_dim} is given; items are compared with queries of model.embedding_dim"
            )
            yield Finding(f"{path}.id.embedding_dim", f"{problem}, which is {width}")
        if item.id.multi_valued:
            yield Finding(f"{path}.id.multi_valued", f"{who}: an event has a single id")
        if pb.USER in item.sides:
            yield Finding(f"{path}.sides", f"{who}: USER does not fit")
        if pb.ITEM in item.sides:
            problem = f"{who}: ITEM does not fit; item_encoder.own_embedding makes it an input"
            yield Finding(f"{path}.sides", problem)
        if pb.HISTORY not in item.sides:
            yield Finding(f"{path}.sides", f"{who}: HISTORY is needed")
        evaluated = [split for split in ("validation", "test") if pipeline.data.HasField(split)]
        if pb.CANDIDATE not in item.sides and evaluated:
            problem = f"CANDIDATE is needed to evaluate on data.{evaluated[0]}: the item to be found"
            yield Finding(f"{path}.sides", problem)

    def _leaks(self) -> Iterator[Finding]:
        for message, path in descend(self.config, self.path):
            if isinstance(message, pb.PositionalEncoder) and message.origin == pb.PositionalEncoder.END:
                problem = "END tells each position how many events follow; next-item training needs START"
                yield Finding(f"{path}.origin", problem)
            if isinstance(message, pb.PositionalEncoder) and message.num_time_buckets:
                problem = "the age at the request tells how much history follows; use 0, and the mixer's bias"
                yield Finding(f"{path}.num_time_buckets", problem)
            if isinstance(message, pb.AttentionMask) and message.contextual_reads_history:
                problem = "next-item training would see the future through contextual tokens; set it to false"
                yield Finding(f"{path}.contextual_reads_history", problem)
            if isinstance(message, pb.LayerGroup) and message.HasField("tail_len"):
                problem = "next-item training makes every event a query: none can be left out"
                yield Finding(f"{path}.tail_len", problem)


@declare(pb.Retriever)
class RetrieverDeclaration(NextItemDeclaration):
    """Declares `Retriever`, which turns a history into a query and searches the catalogue of one feature."""

    @property
    def softmax(self) -> pb.SoftmaxLoss:
        """The message of the softmax of the next-item loss."""
        return self.config.loss.softmax

    @property
    def outputs(self) -> list[str]:
        """The output column: one query vector per row."""
        return ["query"]

    def losses(self) -> list[LossField]:
        """Returns the next-item loss."""
        return [LossField(self.config.loss, f"{self.path}.loss", frozenset({"retrieval"}))]

    def findings(self) -> Iterator[Finding]:
        """Checks the item encoder, after the checks of all next-item families."""
        yield from super().findings()
        if self._encodes_items:
            yield from self._encoder()

    def warnings(self) -> Iterator[Finding]:
        """Yields a norm without effect, after the warnings of all next-item families."""
        yield from super().warnings()
        if self.config.postprocessor.HasField("l2_norm") and self.config.l2_normalize:
            problem = "without effect: l2_normalize gives queries and items unit length in any case"
            yield Finding("model.retriever.postprocessor.l2_norm", problem)

    @property
    def _postprocessor_reads_times(self) -> bool:
        return self.config.postprocessor.HasField("timestamp_layer_norm")

    @property
    def _encodes_items(self) -> bool:
        return self.config.HasField("item_encoder")

    def _encoder(self) -> Iterator[Finding]:
        pipeline, encoder = self.pipeline, self.config.item_encoder
        described = [index for index, feature in enumerate(pipeline.features) if pb.ITEM in feature.sides]
        if described and not pipeline.data.item_file:
            problem = f"not set; features[{described[0]}].sides has ITEM, and such features are read from it"
            yield Finding("data.item_file", problem)
        if not described and not encoder.own_embedding:
            problem = "false is given, and no feature has the side ITEM: nothing describes an item; add one"
            yield Finding(f"{_ENCODER}.own_embedding", problem)
        if not encoder.residual:
            return
        if not described or not encoder.own_embedding:
            problem = "it adds item features to the id embedding, so it needs a feature of side ITEM"
            yield Finding(f"{_ENCODER}.residual", f"{problem} and own_embedding; add them or remove it")
        widths = {feature.name: feature.id.embedding_dim for feature in pipeline.features}
        width, item_width = pipeline.model.embedding_dim, widths.get(self.config.item_feature)
        if item_width not in (None, width):
            problem = (
                f"the item's embedding is {item_width} wide, model.embedding_dim is {width}; make them equal"
            )
            yield Finding(f"{_ENCODER}.residual", problem)


def without_encoder(pipeline: pb.Pipeline) -> Iterator[Finding]:
    """Yields a finding for each feature of side ITEM if the model has no item encoder to read it."""
    if pipeline.model.retriever.HasField("item_encoder"):
        return
    for index, feature in enumerate(pipeline.features):
        if pb.ITEM in feature.sides:
            problem = f"ITEM is for {_ENCODER}, which is not set; set it, or remove the side"
            yield Finding(f"features[{index}].sides", problem)
