"""Implements `recsys.build` and `recsys.load`, and the `Model` that they return."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import recsys.config as configs
from recsys import protos as pb
from recsys.api.batches import device
from recsys.api.configs import Config, config, of_pipeline
from recsys.api.rows import Rows, to_table
from recsys.config import features
from recsys.config.declarations import model_of
from recsys.data.arrow import one_array
from recsys.data.convert.row_checks import Lists
from recsys.data.schema.contract import check_columns, feature_columns
from recsys.data.schema.vocabulary import Vocabulary, mappings
from recsys.errors import ConfigError, RecsysError
from recsys.inference.eager import EagerPackage
from recsys.inference.item_embeddings import vector_table
from recsys.inference.package import DESCRIPTION, Package
from recsys.inference.predictor import Predictor
from recsys.models import base, build_model
from recsys.training import checkpoint, pretrained, warm_start
from recsys.training.names import MODEL
from recsys.training.resume import require_same_model
from recsys.training.session import CHECKPOINTS
from recsys.training.state import capture_rng, restore_rng, seed_everything

log = logging.getLogger(__name__)


class Model:
    """A recommender that takes and returns original ids; ids outside of its vocabularies count as unknown.

    A ranker scores the candidates of each row; a retriever searches all items. Rows may come as any table
    that `recsys.batches` takes. Answers are pyarrow tables, row by row in the order of the input: the
    config's `data.key_columns`, then lists. `answer.to_pandas()` and `polars.from_arrow(answer)` convert
    them.

    Attributes:
        config: the config that the model was built from.
        module: the PyTorch module, with the weights that `fit` trains; None for a package, which is compiled.
        package: the package that the model was loaded from, or None.
    """

    def __init__(self, cfg: Config, module: base.Model | None, package: Package | None = None) -> None:
        """Wraps a module or a package; call `recsys.build` or `recsys.load` instead. Exactly one of `module`
        and `package` is given."""
        self.config = cfg
        self.module = module
        self.package = package
        self._predictor: Predictor | None = None
        self._weights: list[tuple[int, int]] = []

    def __repr__(self) -> str:
        kind = model_of(self.config.pipeline).kind
        if self.module is None:
            return f"<recsys.Model: {kind}, compiled, of {self.package.folder if self.package else ''}>"
        count = sum(parameter.numel() for parameter in self.module.parameters())
        return f"<recsys.Model: {kind} with {count:,} parameters>"

    def score(self, rows: Rows) -> pa.Table:
        """Scores the candidates that each row lists.

        >>> model.score(frame)  # user_id, candidate_item_id, is_click: a list of probabilities for each row

        Args:
            rows: the inputs of the model, the key columns, and the candidates (`candidate_<feature>`).

        Returns:
            The key columns, the candidates, and their scores, as one list per row in the same order. A ranker
            returns one column of scores per task. A retriever returns the column `score`, which is null for
            an unknown item.

        Raises:
            DataError: a column is missing or has a wrong type, or a row is bad; names column and row.
        """
        table = to_table(rows)
        with self._answering() as predictor:
            if predictor.package.items is None:
                return predictor.table(table)
            return _candidate_scores(predictor, table)

    def recommend(self, rows: Rows, k: int = 10, *, by: str | None = None) -> pa.Table:
        """Recommends the best items: of all items for a retriever, of each row's candidates for a ranker.

        >>> model.recommend(frame, k=5)  # user_id, item_id: the best first, score

        Args:
            rows: as for `score`; a retriever needs no candidates. A retriever leaves out items of the
                history, unless the config sets `predict { remove_history: false }`.
            k: number of items per row; a row with fewer items to choose from gets fewer.
            by: the task whose scores a ranker sorts by; the first task by default.

        Returns:
            The key columns, the list of items, and the list of their scores.

        Raises:
            ConfigError: `k` is not between 1 and the number of items, or the task does not exist.
            DataError: as for `score`.
        """
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ConfigError(f"k: {k!r} is given; it must be a whole number of at least 1")
        table = to_table(rows)
        with self._answering() as predictor:
            if predictor.package.items is None:
                return _best_candidates(predictor, table, k, by)
            if by is not None:
                raise ConfigError(f"by: {by!r} is given; the model searches items and has no tasks")
            if k > predictor.most_items:
                what = f"finds {predictor.most_items} items of a row by beam search ({_decoding(predictor)})"
                what = what if predictor.finds_items else f"knows {predictor.most_items} items"
                raise ConfigError(f"k: {k} is given; the model {what}")
            predictor.settings.top_k = k
            return predictor.table(table)

    def embeddings(self, rows: Rows | None = None, *, feature: str | None = None) -> pa.Table:
        """Returns the vectors of all items, of rows, or of a feature's ids.

        >>> model.embeddings()  # id, vector: every item of a retriever, to put into a search engine
        >>> model.embeddings(frame)  # key columns, vector: each row's query for its next item
        >>> model.embeddings(feature="author_id")  # id, vector: the embedding table of a feature

        Args:
            rows: as for `recommend`; only for a retriever.
            feature: an id feature with a vocabulary.

        Returns:
            `id` or the key columns, and `vector`, a list of E float32 numbers. A retriever's score is the
            inner product of the vectors of a row and an item. A row without history has a vector of zeros.

        Raises:
            ConfigError: the model has no such vectors.
            DataError: as for `score`.
        """
        if feature is not None:
            if rows is not None:
                raise ConfigError("rows and feature are given; give one of them")
            return self._table_vectors(feature)
        with self._answering() as predictor:
            if predictor.package.items is None or predictor.has_codes:
                raise ConfigError(
                    "the model has no vectors of rows and items, only scores; feature='item_id' returns the "
                    "embedding table of a feature"
                )
            if rows is None:
                return vector_table({"id": predictor.vocabulary.ids}, predictor.package.items.numpy())
            table = to_table(rows)
            keys = {name: one_array(table[name]) for name in _present_keys(predictor, table)}
            return vector_table(keys, predictor.queries(table))

    def require_module(self, verb: str) -> base.Model:
        """Returns the module to train, evaluate, or ask for its tables.

        Raises:
            ConfigError: the model is a package.
        """
        if self.module is None:
            raise ConfigError(
                f"a package is compiled to predict and cannot be {verb}; load the run folder that it was "
                "exported from"
            )
        return self.module

    def _table_vectors(self, feature: str) -> pa.Table:
        module = self.require_module("asked for its tables")
        message = next((f for f in self.config.pipeline.features if f.name == feature), None)
        table = None if message is None else features.kind_of(message).table
        mapping = mappings(self.config.pipeline).get(table)
        if not isinstance(mapping, Vocabulary):
            kinds = features.kinds(self.config.pipeline)
            names = [kind.feature.name for kind in kinds if kind.vocabulary is not None]
            problem = f"feature: {feature!r} is given; features with a vocabulary are {', '.join(names)}"
            raise ConfigError(problem)
        name = f".{table}_table.weight"
        (weight,) = (tensor for key, tensor in module.state_dict().items() if key.endswith(name))
        places = mapping.layout.row_of(np.arange(len(mapping)))
        return vector_table({"id": mapping.ids}, weight.detach().cpu().numpy()[places])

    @contextmanager
    def _answering(self) -> Iterator[Predictor]:
        """Yields a predictor with the current weights; the module is in evaluation mode during the block."""
        if self.module is None:
            if self._predictor is None and self.package is not None:
                self._predictor = Predictor(self.package, _copy(self.package.pipeline))
            yield _present(self._predictor)
            return
        was_training = self.module.training
        weights = [(p.data_ptr(), p._version) for p in self.module.parameters()]
        if self._predictor is None or weights != self._weights:
            package = EagerPackage(self.module)
            self._predictor, self._weights = Predictor(package, _copy(package.pipeline)), weights
        self.module.eval()
        try:
            yield _present(self._predictor)
        finally:
            self.module.train(was_training)


def build(cfg: Config) -> Model:
    """Builds the model of a config, with weights initialized from `train.seed`.

    >>> model = recsys.build(recsys.config("configs/quickstart.config"))

    Weights that `train.init_from` and `id.init_from` of features name are taken here, so that `fit` begins
    with them. The model is on the GPU if there is one. The random generators of the process do not change.

    Raises:
        ConfigError: `cfg` is not a `Config`, or weights that it names do not fit.
        DataError: a file of pretrained vectors, or a vocabulary of the earlier run, cannot be used.
    """
    if not isinstance(cfg, Config):
        raise ConfigError(
            f"cfg: a {type(cfg).__name__} is given; recsys.config makes a config of a text or file"
        )
    module = _random_module(cfg.pipeline)
    _initialize(module, cfg.pipeline)
    return Model(cfg, module.to(device()))


def _random_module(pipeline: pb.Pipeline) -> base.Model:
    """Builds a model on the CPU with weights of `train.seed`; the generators of the process do not change."""
    before = capture_rng(device())
    try:
        seed_everything(pipeline.train.seed)
        return build_model(pipeline)
    finally:
        restore_rng(before, device())


def _initialize(module: base.Model, pipeline: pb.Pipeline) -> None:
    """Takes pretrained rows and weights of an earlier run, as the config asks."""
    pretrained.initialize(module.state_dict(), pipeline)
    if not pipeline.train.HasField("init_from"):
        return
    if pipeline.train.init_from.optimizer:
        problem = "a model without a run has no states of optimizers; only recsys.train takes them"
        raise ConfigError(f"train.init_from.optimizer: {problem}")
    path = warm_start.find_state(pipeline.train.init_from)
    weights = {MODEL + name: tensor for name, tensor in module.state_dict().items()}
    constants = {MODEL + name for name, _ in module.named_buffers()}
    for line in warm_start.load(pipeline, path, weights, constants, alone=True).lines():
        log.info("%s", line)


def load(folder: str | Path, which: str = "best", *, verify_key: str | Path | None = None) -> Model:
    """Loads a trained model from a run folder, or a package that `recsys.export` wrote.

    >>> recsys.load("runs/quickstart").score(frame)
    >>> recsys.load("runs/quickstart/export").score(frame)  # the same numbers, compiled

    Args:
        folder: run folder of `recsys.train` or of `fit(..., folder=...)`, or the folder of a package.
        which: the checkpoint of a run: "best", "newest", or the number of a step that was kept.
        verify_key: PEM file of the Ed25519 public key that must have signed the package; None to accept any.

    Raises:
        RecsysError: the folder has neither a run nor a package, or it is damaged.
        ConfigError: a vocabulary that the run's config names is gone.
    """
    folder = Path(folder)
    if (folder / DESCRIPTION).is_file():
        package = Package(folder, verify_key=None if verify_key is None else Path(verify_key))
        pipeline = _copy(package.pipeline)
        most = package.description.max_batch_size
        pipeline.data.eval_batch_size = min(pipeline.data.eval_batch_size, most)
        return Model(of_pipeline(pipeline), None, package)
    if not (folder / configs.FILE_NAME).is_file():
        raise RecsysError(
            f"{folder}: holds neither a run ({configs.FILE_NAME}) nor a package ({DESCRIPTION})"
        )
    cfg = config(folder / configs.FILE_NAME)
    path = checkpoint.find(folder / CHECKPOINTS, which)
    require_same_model(checkpoint.read_state(path), cfg.pipeline, path)
    module = _random_module(cfg.pipeline)
    checkpoint.load_weights(path, module)
    return Model(cfg, module.to(device()))


def _copy(pipeline: pb.Pipeline) -> pb.Pipeline:
    copied = pb.Pipeline()
    copied.CopyFrom(pipeline)
    return copied


def _present(predictor: Predictor | None) -> Predictor:
    if predictor is None:
        raise ValueError("a Model needs a module or a package")
    return predictor


def _present_keys(predictor: Predictor, table: pa.Table) -> list[str]:
    return [name for name in predictor.pipeline.data.key_columns if name in table.column_names]


def _best_candidates(predictor: Predictor, table: pa.Table, k: int, by: str | None) -> pa.Table:
    """Sorts the candidates of each row by the score of a task; ties keep the order of the row."""
    tasks = model_of(predictor.pipeline).outputs
    task = tasks[0] if by is None else by
    if task not in tasks:
        raise ConfigError(f"by: {task!r} is given; the tasks are {', '.join(tasks)}")
    answer = predictor.table(table)
    item = features.candidate_item(predictor.pipeline)
    if item is None:
        raise ConfigError("the model has no id feature of candidates, so there is nothing to recommend")
    scores, items = one_array(answer[task]), one_array(answer[item])
    starts, lengths = _spans(scores)
    row = np.repeat(np.arange(len(lengths)), lengths)
    flat = scores.flatten().to_numpy(zero_copy_only=False)
    order = np.lexsort((np.arange(len(flat)), -flat, row))
    rank = np.arange(len(flat)) - np.repeat(starts, lengths)
    chosen = pa.array(order[rank < k])
    kept = np.minimum(lengths, k)
    # A row that was left out as bad has null scores, and its candidates are not in the answer.
    good = items.filter(scores.is_valid())
    answer = answer.select(_present_keys(predictor, table))
    name = item.removeprefix(features.PREFIX[pb.CANDIDATE])
    answer = answer.append_column(name, _lists(good.flatten().take(chosen), kept, scores))
    return answer.append_column(features.SCORE, _lists(scores.flatten().take(chosen), kept, scores))


def _decoding(predictor: Predictor) -> str:
    return f"{model_of(predictor.pipeline).path}.decoding"


def _candidate_scores(predictor: Predictor, table: pa.Table) -> pa.Table:
    """Computes the inner products of each row's vector and its candidates' vectors, null for an unknown
    item."""
    if predictor.finds_items:
        raise ConfigError(
            "the model finds items by beam search and does not score given ones; "
            f"{_decoding(predictor)} with method: EXACT does"
        )
    name = features.PREFIX[pb.CANDIDATE] + predictor.item
    item = features.kind_of(features.searched_item(predictor.pipeline))
    check_columns(table.schema, feature_columns(item, pb.CANDIDATE), "rows")
    queries = predictor.queries(table)
    lists = Lists.of(one_array(table[name]))
    places = predictor.vocabulary.layout.id_of(predictor.vocabulary.map(lists.values))
    row = np.repeat(np.arange(len(lists.lengths)), lists.lengths)
    is_item = places >= 0
    if predictor.scores_items:
        scores = queries[row, np.maximum(places, 0)]
    else:
        vectors = predictor.package.items.numpy()
        scores = np.einsum("ne,ne->n", queries[row], vectors[np.maximum(places, 0)])
    ends = np.concatenate([[0], np.cumsum(lists.lengths)]).astype(np.int32)
    answer = table.select([*_present_keys(predictor, table), name])
    values = pa.array(scores, mask=~is_item)
    return answer.append_column(features.SCORE, pa.ListArray.from_arrays(ends, values))


def _spans(lists: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the starts and lengths of lists within their concatenated values; a null list has length 0."""
    lengths = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return np.cumsum(lengths) - lengths, lengths


def _lists(values: pa.Array, lengths: np.ndarray, like: pa.Array) -> pa.Array:
    """Cuts concatenated values into one list per row, which is null where `like` is null."""
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    offsets = pa.array(ends, mask=np.append(like.is_null().to_numpy(zero_copy_only=False), False))
    return pa.ListArray.from_arrays(offsets, values)
