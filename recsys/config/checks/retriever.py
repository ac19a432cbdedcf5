"""Rules of retrievers: what their items are and how they are encoded, and that no position sees what comes
after it.

`models.retriever` asks for them too: a model that is built without a command is refused for the same reasons.
"""

from collections.abc import Iterator

from recsys import protos as pb
from recsys.config.checks.walk import Finding, descend
from recsys.config.textproto import did_you_mean


def _item(pipeline: pb.Pipeline) -> Iterator[Finding]:
    if not pipeline.model.HasField("retriever"):
        return
    name = pipeline.model.retriever.item_feature
    known = {feature.name: (index, feature) for index, feature in enumerate(pipeline.features)}
    if name and name not in known:
        hint = did_you_mean(name, known)
        yield Finding("model.retriever.item_feature", f"no feature is called {name!r}. {hint}")
    if name not in known:
        return
    index, item = known[name]
    path = f"features[{index}]"
    if not item.id.HasField("vocabulary"):
        yield Finding(
            path, "it is the item of the retriever, whose catalogue is a vocabulary; use id { vocabulary {} }"
        )
    encoded = pipeline.model.retriever.HasField("item_encoder")
    if item.HasField("id") and not encoded and item.id.embedding_dim != pipeline.model.embedding_dim:
        what = f"{item.id.embedding_dim} is given; items are compared with queries of model.embedding_dim"
        yield Finding(f"{path}.id.embedding_dim", f"{what}, which is {pipeline.model.embedding_dim}")
    if item.id.multi_valued:
        yield Finding(f"{path}.id.multi_valued", "it is the item of the retriever: one id an event")
    if pb.USER in item.sides:
        yield Finding(f"{path}.sides", "it is the item of the retriever: USER does not fit")
    if pb.ITEM in item.sides:
        what = (
            "it is the item of the retriever: ITEM does not fit; item_encoder.own_embedding makes it an input"
        )
        yield Finding(f"{path}.sides", what)
    if pb.HISTORY not in item.sides:
        yield Finding(f"{path}.sides", "it is the item of the retriever: HISTORY is needed")
    evaluated = [split for split in ("validation", "test") if pipeline.data.HasField(split)]
    if pb.CANDIDATE not in item.sides and evaluated:
        yield Finding(
            f"{path}.sides", f"CANDIDATE is needed to evaluate on data.{evaluated[0]}: the item to be found"
        )


def _item_encoder(pipeline: pb.Pipeline) -> Iterator[Finding]:
    retriever, path = pipeline.model.retriever, "model.retriever.item_encoder"
    described = [index for index, feature in enumerate(pipeline.features) if pb.ITEM in feature.sides]
    if not retriever.HasField("item_encoder"):
        for index in described:
            what = f"ITEM is for {path}, which is not set; set it or drop the side"
            yield Finding(f"features[{index}].sides", what)
        return
    encoder = retriever.item_encoder
    if described and not pipeline.data.item_file:
        what = f"not set; features[{described[0]}].sides has ITEM, and such features are read from it"
        yield Finding("data.item_file", what)
    if not described and not encoder.own_embedding:
        what = "false is given, and no feature has the side ITEM: nothing is known of an item; add one"
        yield Finding(f"{path}.own_embedding", what)
    if not encoder.residual:
        return
    if not described or not encoder.own_embedding:
        what = "it adds features of items to their own embedding: a feature of side ITEM and own_embedding"
        yield Finding(f"{path}.residual", f"{what} are needed; add them or drop it")
    widths = {feature.name: feature.id.embedding_dim for feature in pipeline.features}
    width, given = pipeline.model.embedding_dim, widths.get(retriever.item_feature)
    if given not in (None, width):
        what = f"the item's embedding is {given} wide, model.embedding_dim is {width}; make them equal"
        yield Finding(f"{path}.residual", what)


def _no_leak(pipeline: pb.Pipeline) -> Iterator[Finding]:
    """Next-item training: a position must see nothing of what comes after it."""
    if not pipeline.model.HasField("retriever"):
        return
    for message, path in descend(pipeline.model.retriever, "model.retriever"):
        if isinstance(message, pb.PositionalEncoder) and message.origin == pb.PositionalEncoder.END:
            what = "END tells each position how many events follow; next-item training needs START"
            yield Finding(f"{path}.origin", what)
        if isinstance(message, pb.PositionalEncoder) and message.num_time_buckets:
            what = "the age at the request tells how much history follows; use 0, and the mixer's bias"
            yield Finding(f"{path}.num_time_buckets", what)
        if isinstance(message, pb.AttentionMask) and message.contextual_reads_history:
            what = "next-item training would see the future through contextual tokens; set it to false"
            yield Finding(f"{path}.contextual_reads_history", what)
        if isinstance(message, pb.LayerGroup) and message.HasField("tail_len"):
            what = "next-item training makes every event a query: none can be left out"
            yield Finding(f"{path}.tail_len", what)


def _no_user_features(pipeline: pb.Pipeline) -> Iterator[Finding]:
    if not pipeline.model.HasField("retriever"):
        return
    for other, feature in enumerate(pipeline.features):
        if pb.USER in feature.sides:
            what = "USER features have no place in the history of a retriever; drop the side"
            yield Finding(f"features[{other}].sides", what)


RULES = (_item, _item_encoder, _no_user_features, _no_leak)
