"""Declarations: the facts that families of models and mixers state before anything is built.

A config is checked without torch, so the facts that this needs about a model are in a class of their own, the
family's declaration, which `registry.declare` registers under the family's message. Configs, readers,
commands and packages ask `model_of(pipeline)` and `mixer_of(pipeline)` and never name a family or a mixer
themselves. The defaults below describe a model that scores every candidate of a row for each of its tasks.
"""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

from google.protobuf.message import Message

from recsys import protos as pb
from recsys.config import fields, registry
from recsys.config.checks import choices
from recsys.config.checks.walk import Finding

TASK_KINDS = frozenset({"binary", "regression"})
"""Kinds of labels that a task may have."""


class Choice(NamedTuple):
    """The value that a field gets when a config leaves it open.

    Attributes:
        message: the message that holds the field.
        path: path of `message` in the pipeline, e.g. `model.ranker.mixer.hstu`.
        field: name of the field.
        value: the field's new value.
        origin: where the value comes from, as `--print-config` shows it.
    """

    message: Message
    path: str
    field: str
    value: Any
    origin: str


class LossField(NamedTuple):
    """A loss of a model, its path, and the kinds of labels that it may have."""

    loss: pb.Loss
    path: str
    kinds: frozenset[str]


class WeightColumn(NamedTuple):
    """A column with weights of a loss, and the path of the field that names the column."""

    name: str
    path: str


class MetricList(NamedTuple):
    """Metrics that are computed from the same predictions.

    Attributes:
        metrics: the messages of the metrics.
        path: path of the message that holds them.
        prefix: prefix of their names in logs, e.g. `is_click/`.
        kind: the kind of labels that they must fit; None if the loss is missing or misplaced.
    """

    metrics: Sequence[pb.Metric]
    path: str
    prefix: str
    kind: str | None


class SeenRule(NamedTuple):
    """The rule of evaluation and prediction for items that the user of a row has seen.

    Attributes:
        removed: seen items are not recommended, so a target among them is a miss.
        left_out: a target among the removed items does not count at all, instead of being a miss.
    """

    removed: bool = True
    left_out: bool = False


class ModelDeclaration:
    """Answers questions about the model of a config. A family overrides what differs from the defaults.

    Attributes:
        pipeline: the config, resolved unless a method says otherwise.
        config: the family's message inside `pipeline`.
        kind: name of the family's field in `pb.Model`, such as `[acme.dot]` for a family of another package;
            empty if the config chooses no model.
        path: path of `config` in the pipeline.
    """

    has_targets: ClassVar[bool] = True
    """True if candidates are tokens of the sequence, after the history."""

    keeps_cache: ClassVar[bool] = False
    """True if the model can score candidates against a cache of their row's history. Its mixer must be able
    to do so too."""

    may_change: ClassVar[tuple[str, ...]] = (
        "tasks.label",
        "tasks.label_bits",
        "tasks.metrics",
        "tasks.weight",
        "tasks.weight_column",
    )
    """Fields below the family's message that may change without invalidating trained weights."""

    embeds_items: ClassVar[bool] = True
    """True if the items that the model searches have an embedding table. A model with its own representation
    of items has none for them."""

    divides_catalogue: ClassVar[bool] = False
    """True if each rank can compare the queries of all ranks with its part of the catalogue in training."""

    weight_sides: ClassVar[tuple[int, ...]] = (pb.USER, pb.CANDIDATE)
    """Sides that a column with weights of a loss may have."""

    def __init__(self, pipeline: pb.Pipeline, config: Message, kind: str):
        self.pipeline = pipeline
        self.config = config
        self.kind = kind
        self.path = f"model.{kind}"

    @property
    def tasks(self) -> Sequence[pb.Task]:
        """Returns the tasks, the predictions for each candidate; empty for a model without tasks."""
        return getattr(self.config, "tasks", ())

    @property
    def history_reads_request_time(self) -> bool:
        """Whether the cached keys and values of a history may depend on the time of the request."""
        return True

    @property
    def preprocessor(self) -> Message | None:
        """Returns the message of the chosen preprocessor, or None without one."""
        return _chosen_part(self.config, "preprocessor")

    @property
    def item_feature(self) -> str | None:
        """Name of the id feature whose vocabulary is the catalogue that the model searches.

        It is None for a model that scores the candidates of its rows.
        """
        return None

    @property
    def scores_items(self) -> bool:
        """Whether a model that searches items answers a row with the scores of all items, instead of a query
        that is compared with vectors of items."""
        return False

    @property
    def num_found(self) -> int | None:
        """Number of items with which the model answers a row, if it finds the best itself, without those that
        the row has seen; None if it gives vectors or the scores of all items."""
        return None

    @property
    def finds_items(self) -> bool:
        """Whether the model finds the best items itself."""
        return self.num_found is not None

    @property
    def mixes_scores(self) -> bool:
        """Whether a weight of the config mixes two kinds of scores, so that weights can be compared."""
        return False

    @property
    def code_bundle(self) -> str:
        """The folder with the semantic ids of the items; empty for a model without such ids."""
        return ""

    @property
    def seen_rule(self) -> SeenRule:
        """Rule for the items of a row's history, for a model that searches items."""
        return SeenRule()

    @property
    def protocol(self) -> dict[str, str]:
        """Returns the settings, by name, that decide how evaluation ranks items and which targets count."""
        return {}

    def removes_seen(self, mode: str) -> bool:
        """Returns whether reading to `train`, `evaluate` or `predict` needs all items of a row's history."""
        if self.item_feature is None or mode == "train":
            return False
        return self.pipeline.predict.remove_history if mode == "predict" else self.seen_rule.removed

    @property
    def softmax(self) -> pb.SoftmaxLoss:
        """Message of the softmax over the catalogue; empty for a model that searches no items."""
        return pb.SoftmaxLoss()

    @property
    def outputs(self) -> list[str]:
        """Returns the names of the columns that the model's `score` returns."""
        return [task.name for task in self.tasks]

    def reads_candidates(self, mode: str) -> bool:
        """Returns whether batches need candidates when they are read to `train`, `evaluate` or `predict`."""
        return True

    def choices(self) -> Iterator[Choice]:
        """Yields values that the family derives for fields that the config, not yet resolved, leaves open."""
        return iter(())

    def choices_by_size(self) -> Iterator[Choice]:
        """Yields values that the family derives from the sizes of vocabularies, unknown to `choices`."""
        return iter(())

    def findings(self) -> Iterator[Finding]:
        """Yields violations of the family's rules across fields. The config may also be wrong elsewhere."""
        return iter(())

    def warnings(self) -> Iterator[Finding]:
        """Yields warnings about settings of the config, as written, that the family does not use."""
        return iter(())

    def losses(self) -> list[LossField]:
        """Returns every loss of the model."""
        return [
            LossField(task.loss, f"{self.path}.tasks[{index}].loss", TASK_KINDS)
            for index, task in enumerate(self.tasks)
        ]

    def weight_columns(self) -> list[WeightColumn]:
        """Returns every column with weights of a loss; tasks may share a column."""
        return [
            WeightColumn(task.weight_column, f"{self.path}.tasks[{index}].weight_column")
            for index, task in enumerate(self.tasks)
            if task.weight_column
        ]

    def metrics(self) -> list[MetricList]:
        """Returns every metric of the model, in the order in which logs show them."""
        lists = []
        for index, task in enumerate(self.tasks):
            kind = choices.loss_kind(task.loss)
            path, prefix = f"{self.path}.tasks[{index}]", f"{task.name}/"
            lists.append(MetricList(task.metrics, path, prefix, kind if kind in TASK_KINDS else None))
        return lists


class MixerDeclaration:
    """Answers questions about a mixer's message. A mixer overrides what differs from the defaults.

    Attributes:
        config: the mixer's message.
        path: path of `config` in the pipeline.
        model: the model around it.
    """

    keeps_cache: ClassVar[bool] = False
    """True if the mixer can score candidates against cached keys and values of a history."""

    @property
    def reads_times(self) -> bool:
        """Returns whether the mixer's output depends on the times of tokens."""
        return False

    def __init__(self, config: Message, path: str, model: pb.Model):
        self.config = config
        self.path = path
        self.model = model

    def choices(self) -> Iterator[Choice]:
        """Yields values that the mixer derives for fields that the config, not yet resolved, leaves open."""
        return iter(())

    def findings(self) -> Iterator[Finding]:
        """Yields violations of the mixer's rules. The config may also be wrong elsewhere."""
        return iter(())


def model_of(pipeline: pb.Pipeline) -> ModelDeclaration:
    """Returns the declaration of a config's model, or the defaults, without tasks, if it chooses no model."""
    field = fields.chosen(pipeline.model)
    if field is None:
        return ModelDeclaration(pipeline, pb.Model(), "")
    config = fields.value_of(pipeline.model, field)
    declared = registry.declaration(type(config)) or ModelDeclaration
    return declared(pipeline, config, fields.name_of(field))


def mixer_of(pipeline: pb.Pipeline) -> MixerDeclaration | None:
    """Returns the declaration of the mixer of a config's model, or None if the model has or chooses no
    mixer."""
    model = model_of(pipeline)
    choice = choices.part(model.config, "mixer")
    return None if choice is None else declared_mixer(choice, f"{model.path}.mixer", pipeline.model)


def declared_mixer(choice: pb.Mixer, path: str, model: pb.Model) -> MixerDeclaration | None:
    """Returns the declaration of the mixer that `choice`, a message at `path`, sets; None if it sets none."""
    field = fields.chosen(choice)
    if field is None:
        return None
    config = fields.value_of(choice, field)
    declared = registry.declaration(type(config)) or MixerDeclaration
    return declared(config, f"{path}.{fields.name_of(field)}", model)


def _chosen_part(config: Message, name: str) -> Message | None:
    """Returns the message of the component that is chosen in the field `name` of `config`."""
    choice = choices.part(config, name)
    field = fields.chosen(choice) if choice is not None else None
    return None if field is None else fields.value_of(choice, field)
