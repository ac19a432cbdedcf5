"""Warns about settings that are allowed but have no effect, or a surprising one."""

from collections.abc import Iterator

from recsys import protos as pb
from recsys.config.checks.sequence import tokens_per_event
from recsys.config.checks.train import sharded
from recsys.config.checks.walk import Finding, descend
from recsys.config.declarations import model_of
from recsys.config.feature_kinds import kinds


def _replicated(pipeline: pb.Pipeline) -> Iterator[Finding]:
    if sharded(pipeline):
        return
    for field in ("sparse_optimizer", "sharding", "sharding_plan", "unique_ids"):
        if pipeline.train.HasField(field):
            problem = "without effect: REPLICATED tables are trained by train.dense_optimizer"
            yield Finding(f"train.{field}", problem)


def _sharding(pipeline: pb.Pipeline) -> Iterator[Finding]:
    sharding, path = pipeline.train.sharding, "train.sharding"
    if pipeline.train.HasField("sharding_plan") and pipeline.train.HasField("sharding"):
        yield Finding(path, "without effect: train.sharding_plan divides the tables")
        return
    messages = [(path, sharding), *((f"{path}.tables[{i}]", t) for i, t in enumerate(sharding.tables))]
    kernels = {message.kernel or sharding.kernel for _, message in messages}
    for place, message in messages:
        caches = kernels if message is sharding else {message.kernel or sharding.kernel}
        if message.HasField("cache_load_factor") and pb.TableSharding.FUSED_UVM_CACHING not in caches:
            yield Finding(f"{place}.cache_load_factor", "without effect: the kernel is not FUSED_UVM_CACHING")


def _accumulation(pipeline: pb.Pipeline) -> Iterator[Finding]:
    if pipeline.train.accumulate_batches > 1 and sharded(pipeline):
        problem = "applies to dense parameters only: sharded tables are updated by every batch"
        yield Finding("train.accumulate_batches", problem)


def _length(pipeline: pb.Pipeline) -> Iterator[Finding]:
    if pipeline.train.HasField("num_steps"):
        yield from behind_the_end(pipeline, pipeline.train.num_steps)


def behind_the_end(pipeline: pb.Pipeline, steps: int) -> Iterator[Finding]:
    """Yields warnings about settings for which a run of `steps` optimizer steps is too short.

    The number of steps of a run of epochs is known only when its training rows have been counted.
    """
    train = pipeline.train
    warmup, evaluation_steps = train.schedule.warmup_steps, train.evaluation.every_steps
    if warmup >= steps:
        problem = "so it ends while the learning rate is still rising; reduce it"
        yield Finding(
            "train.schedule.warmup_steps", f"{warmup} is given and the run has {steps} steps, {problem}"
        )
    if pipeline.data.HasField("validation") and evaluation_steps > steps:
        problem = "so the model is evaluated only once, at the end; reduce it"
        yield Finding(
            "train.evaluation.every_steps",
            f"{evaluation_steps} is given and the run has {steps} steps, {problem}",
        )
    if problem := _never_averaged(train, steps):
        yield Finding("train.weight_averaging", problem)


def _never_averaged(train: pb.Train, steps: int) -> str | None:
    """Returns the warning about a run of `steps` that ends before any weights are averaged, or None."""
    averaging = train.weight_averaging
    swa = averaging.HasField("swa")
    first = averaging.swa.start_step if swa else averaging.ema.every_steps
    if not train.HasField("weight_averaging") or steps >= first:
        return None
    name = "swa.start_step" if swa else "ema.every_steps"
    return f"without effect: {name} is {first} and the run has {steps} steps"


def _masks(pipeline: pb.Pipeline) -> Iterator[Finding]:
    for message, path in descend(pipeline.model, "model"):
        if not isinstance(message, pb.AttentionMask):
            continue
        if not message.HasField("window"):
            for field in ("prefix", "target_window"):
                if getattr(message, field):
                    yield Finding(f"{path}.{field}", "without effect: there is no window")


def _tails(pipeline: pb.Pipeline) -> Iterator[Finding]:
    factor = tokens_per_event(pipeline)
    for message, path in descend(pipeline.model, "model"):
        if not isinstance(message, pb.LayerGroup) or not message.HasField("tail_len"):
            continue
        kept = message.tail_len * (factor if message.tail_unit == pb.EVENTS else 1)
        if kept >= pipeline.data.max_history_len * factor:
            problem = "without effect: no history is longer, see data.max_history_len"
            yield Finding(f"{path}.tail_len", problem)


def _kinds(pipeline: pb.Pipeline) -> Iterator[Finding]:
    """Yields the warnings of the kinds of features."""
    for kind in kinds(pipeline):
        yield from kind.warnings()
        if kind.vocabulary is not None and kind.vocabulary.unknown_rate == 0:
            problem = (
                "0 is given: the row of ids that are not in the vocabulary is never trained, so such an id"
            )
            yield Finding(f"{kind.path}.vocabulary.unknown_rate", f"{problem} gets a random vector")


def _family(pipeline: pb.Pipeline) -> Iterator[Finding]:
    """Yields the warnings that the family of the model declares."""
    yield from model_of(pipeline).warnings()


def _row_losses(pipeline: pb.Pipeline) -> Iterator[Finding]:
    """Losses that compare the candidates of a row should have several candidates and a pointwise part."""
    for message, path in descend(pipeline.model, "model"):
        if not isinstance(message, (pb.JrcLoss, pb.PairwiseLoss)):
            continue
        if pipeline.data.HasField("max_candidates") and pipeline.data.max_candidates == 1:
            problem = "compares the candidates of a row, and data.max_candidates leaves one in each"
            yield Finding(path, problem)
        if message.pointwise_share == 0:
            problem = "0 is given: predictions order the candidates of a row, but their values mean nothing"
            yield Finding(f"{path}.pointwise_share", problem)


def _index(pipeline: pb.Pipeline) -> Iterator[Finding]:
    model = model_of(pipeline)
    if pipeline.predict.HasField("index") and model.kind and model.item_feature is None:
        yield Finding("predict.index", f"without effect: a {model.kind} scores the candidates of its rows")
    if pipeline.predict.HasField("index") and model.scores_items:
        yield Finding("predict.index", f"without effect: a {model.kind} scores every item")


def _item_file(pipeline: pb.Pipeline) -> Iterator[Finding]:
    if pipeline.data.item_file and not any(pb.ITEM in feature.sides for feature in pipeline.features):
        yield Finding("data.item_file", "without effect: no feature has the side ITEM")


def _unevaluated(pipeline: pb.Pipeline) -> Iterator[Finding]:
    if not pipeline.data.HasField("validation") and not pipeline.data.HasField("test"):
        yield Finding("data.validation", "not set: the model will not be evaluated")


RULES = (
    _replicated,
    _sharding,
    _accumulation,
    _length,
    _masks,
    _tails,
    _kinds,
    _family,
    _row_losses,
    _index,
    _item_file,
    _unevaluated,
)
