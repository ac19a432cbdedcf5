"""Turns the features of a config into columns and tables, whose names files, batches and models agree on.

The reader finds its columns here, and models find their embedding tables. All functions need a resolved
Pipeline, with tables, widths and vocabulary sizes filled in.
"""

from dataclasses import dataclass, replace

from recsys import protos as pb
from recsys.config.declarations import model_of
from recsys.config.feature_kinds import PREFIX, FeatureKind, kind_of, kinds

TIMESTAMPS = "timestamps"
ACTIONS = "actions"
WATCH_TIME = "watch_time"
REQUEST_TIME = "request_time"
SCORE = "score"
"""Column of predictions that holds the scores of found items."""

CODES = "codes"
"""Column of predictions that holds the semantic ids of found items, one list of codes for each."""

NEGATIVES = "negatives"
"""Key of the items that a batch's queries are compared with, as rows of the item table."""

BATCH_ITEMS = "batch_items"
"""Key of the distinct items of a batch's histories, ascending; present only if negatives are sampled."""

SEEN = "seen"
"""Column of converted rows with all items of a row's history, also those beyond `data.max_history_len`, as
rows of the item table; present only if the model removes seen items."""

LOG_WEIGHTS = "log_weights"
"""Key of the numbers that are added to the scores of `NEGATIVES`, followed by those of `BATCH_ITEMS`, to
correct for how often each item is drawn."""


def side_of(column: str) -> int:
    """Returns the side of a column that belongs to no feature, by its prefix: pb.HISTORY, pb.CANDIDATE, else
    pb.USER."""
    return next((side for side in (pb.HISTORY, pb.CANDIDATE) if column.startswith(PREFIX[side])), pb.USER)


@dataclass(frozen=True)
class Column:
    """One feature on one side.

    Attributes:
        name: key in the batch, e.g. `uih_item_id`; most kinds read the column of this name in the file.
        side: pb.USER, pb.HISTORY, pb.CANDIDATE or pb.ITEM.
        kind: the kind of the feature.
        table: name of the embedding table; None for numbers that are used without one.
        width: width of the vector that the model receives.
        multi_valued: whether each row, event or candidate has a list of table rows.
    """

    name: str
    side: int
    kind: FeatureKind
    table: str | None
    width: int
    multi_valued: bool

    @property
    def feature(self) -> pb.Feature:
        """The feature's message."""
        return self.kind.feature

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Sizes of the tensor of numbers in a batch behind its first one: () for one number each."""
        width = self.kind.input_width
        return () if self.table is not None or width == 1 else (width,)


@dataclass(frozen=True)
class Table:
    """One embedding table of `rows` x `width` numbers.

    Attributes:
        name: name in the config.
        rows, width: its shape.
        columns: names of the columns that read it.
        sharded: whether the sparse optimizer trains it, divided over the ranks.
        precision: number type of its rows, pb.FP32 or pb.FP16.
    """

    name: str
    rows: int
    width: int
    columns: tuple[str, ...]
    sharded: bool = True
    precision: int = pb.FP32

    @property
    def num_bytes(self) -> int:
        """Bytes of the trained numbers."""
        return self.rows * self.width * (2 if self.precision == pb.FP16 else 4)


def columns(pipeline: pb.Pipeline, side: int | None = None) -> list[Column]:
    """Returns the columns of features in event files: in the config's order of features, and for each feature
    in the order USER, HISTORY, CANDIDATE.

    Args:
        pipeline: resolved.
        side: return only columns of this side; pb.ITEM selects the columns of the catalogue, which no event
            file has.
    """
    result = []
    for kind in kinds(pipeline):
        for feature_side in sorted(set(kind.feature.sides)):
            if feature_side == side or (side is None and feature_side != pb.ITEM):
                result.append(_column(kind, feature_side))
    return result


def candidate_item(pipeline: pb.Pipeline) -> str | None:
    """Returns the column that identifies candidates, the first single-valued id feature of side CANDIDATE."""
    names = (
        feature.name
        for feature in pipeline.features
        if pb.CANDIDATE in feature.sides and feature.HasField("id") and not feature.id.multi_valued
    )
    name = next(names, None)
    return None if name is None else PREFIX[pb.CANDIDATE] + name


def item_columns(pipeline: pb.Pipeline) -> list[Column]:
    """Returns one column of each feature of events or candidates, in the config's order: the content of an
    item."""
    by_name: dict[str, Column] = {}
    for column in columns(pipeline):
        if column.side != pb.USER:
            by_name.setdefault(column.feature.name, column)
    return list(by_name.values())


def tables(pipeline: pb.Pipeline) -> list[Table]:
    """Returns the embedding tables in order of first use, with the numbers of rows of the resolved config.

    Row 0 of a vocabulary's table stands for unknown ids, so it has `vocabulary.size` + 1 rows. The
    `shared_columns` also read the table of the items that a model searches, unless it does not embed them.

    Raises:
        ValueError: the model searches items, and no id feature has the name that it gives.
    """
    by_name: dict[str, Table] = {}
    for column in [*columns(pipeline), *columns(pipeline, pb.ITEM)]:
        if column.table is None:
            continue
        earlier = by_name.get(column.table)
        names = (earlier.columns if earlier else ()) + (column.name,)
        name = column.table
        by_name[name] = Table(
            name,
            column.kind.rows,
            column.kind.input_width,
            names,
            is_sharded(pipeline, name),
            table_precision(pipeline, name),
        )
    model = model_of(pipeline)
    if model.item_feature is not None:
        table = by_name.get(_item_table(pipeline, model.item_feature))
        if table is None:
            problem = f"{model.item_feature!r} is given; no id feature has this name"
            raise ValueError(f"{model.path}.item_feature: {problem}")
        names = (*table.columns, *shared_columns(pipeline))
        by_name[table.name] = replace(table, columns=names)
        if not model.embeds_items:
            del by_name[table.name]
    return list(by_name.values())


def mapped_tables(pipeline: pb.Pipeline) -> list[Table]:
    """Returns the tables that a package keeps in files of their own, by `export.tables`."""
    limit = pipeline.export.tables.memory_map_above_bytes
    return [table for table in tables(pipeline) if table.num_bytes > limit]


def is_sharded(pipeline: pb.Pipeline, table: str) -> bool:
    """Returns whether a table is divided over the ranks and trained by the sparse optimizer."""
    embedding = pipeline.model.embedding
    chosen = [entry.placement for entry in embedding.tables if entry.table == table and entry.placement]
    return (chosen[0] if chosen else embedding.placement) == pb.Embedding.SHARDED


def table_precision(pipeline: pb.Pipeline, table: str) -> int:
    """Returns the number type of a table's rows. Tables that are not sharded are FP32."""
    if not is_sharded(pipeline, table):
        return pb.FP32
    embedding = pipeline.model.embedding
    chosen = [entry for entry in embedding.tables if entry.table == table and entry.table_precision]
    return chosen[0].table_precision if chosen else embedding.table_precision


def table_names(pipeline: pb.Pipeline) -> list[str]:
    """Returns the names of all embedding tables that the features have, in the order of the config."""
    return list(dict.fromkeys(kind.table for kind in kinds(pipeline) if kind.table is not None))


def shared_columns(pipeline: pb.Pipeline) -> list[str]:
    """Returns the columns of a batch that belong to no row: items that queries are compared with, as rows of
    the item table.

    The list is empty for a model that searches no items.
    """
    if model_of(pipeline).item_feature is None:
        return []
    return [NEGATIVES, BATCH_ITEMS] if samples_negatives(pipeline) else [NEGATIVES]


def samples_negatives(pipeline: pb.Pipeline) -> bool:
    """Returns whether the model is trained with a sample of its items as negatives."""
    return model_of(pipeline).softmax.WhichOneof("negatives") in ("uniform", "in_batch", "frequency")


def divides_catalogue(pipeline: pb.Pipeline) -> bool:
    """Returns whether ranks divide the catalogue among them in training.

    They do for a softmax over all items of a sharded table, so that rows need not be exchanged.
    """
    model = model_of(pipeline)
    if model.item_feature is None or not (model.embeds_items and model.divides_catalogue):
        return False
    divided = is_sharded(pipeline, _item_table(pipeline, model.item_feature))
    return divided and not samples_negatives(pipeline)


def catalogue_rows(num_rows: int, rank: int, world_size: int) -> range:
    """Returns the rows of a rank's items in the item table, which has `num_rows`; row 0 is no item.

    They are the rows that the rank holds if the table is divided into blocks of rows.
    """
    block = -(-num_rows // world_size)
    return range(min(max(1, rank * block), num_rows), min((rank + 1) * block, num_rows))


def searched_item(pipeline: pb.Pipeline) -> pb.Feature:
    """Returns the feature whose vocabulary is the catalogue that the model searches.

    Raises:
        ValueError: the model searches no items, or no feature has the name that it gives.
    """
    model = model_of(pipeline)
    for feature in pipeline.features:
        if feature.name == model.item_feature:
            return feature
    raise ValueError(f"{model.path}.item_feature: {model.item_feature!r} is given; no feature has this name")


def _item_table(pipeline: pb.Pipeline, name: str) -> str:
    """Returns the table of the id feature `name`, or an empty text if there is no such feature."""
    items = [c.table for c in columns(pipeline) if c.feature.name == name and c.feature.HasField("id")]
    return items[0] or "" if items else ""


def table_rows(feature: pb.Feature) -> int:
    """Returns the number of rows of a feature's embedding table."""
    return kind_of(feature).rows


def _column(kind: FeatureKind, side: int) -> Column:
    return Column(PREFIX[side] + kind.feature.name, side, kind, kind.table, kind.width, kind.multi_valued)
