"""Lets a `Predictor` use a model in eager mode instead of an exported package."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from recsys import protos as pb
from recsys.config.declarations import model_of
from recsys.data.batch import Batch, Position
from recsys.data.collator import Collator
from recsys.data.convert.packer import Packer
from recsys.inference.item_embeddings import catalogue
from recsys.models.base import Model, layout_rule
from recsys.ops import TopK
from recsys.scoring.cache import UserCache
from recsys.scoring.cached_signature import CachedGraph, CacheSpec, cached_inputs
from recsys.scoring.padded_inputs import PaddedInputs, padded_cached_inputs
from recsys.scoring.prefill import CachedModel, keeps_cache
from recsys.scoring.recorded import RecordedScoring, as_tuple
from recsys.scoring.signature import ScoringGraph, inputs_of, scoring_signature
from recsys.training import checkpoint
from recsys.training.resume import require_same_model
from recsys.training.session import CHECKPOINTS
from recsys.training.stored_table import load_model


class EagerDescription(NamedTuple):
    """The part of a package's description that predictions need.

    Attributes:
        device: "cpu" or "cuda".
        outputs: names of the output's columns.
    """

    device: str
    outputs: list[str]


class EagerPackage:
    """Runs the scoring graph of a model without compiling it; a `Program` for a `Scorer`.

    A GPU replays recorded graphs for small batches; see `RecordedScoring`.

    Args:
        model: a model on any device. It is put into evaluation mode and must keep its weights while this
            object is used, because the vectors of all items are computed here.
        folder: the checkpoint of the weights, if they have one.

    Attributes:
        folder: folder whose manifest identifies the weights; None if there is none.
        pipeline: the resolved config of the model.
        description: the device and the outputs.
        items: float32 [V, E] on the host, the vectors of all items in the order of the vocabulary, if the
            model searches items; else None.
        device: the device that computes.
        cache_spec: describes the tensors of a cache; None if the model scores without one.
    """

    def __init__(self, model: Model, folder: Path | None = None) -> None:
        declared = model_of(model.pipeline)
        self.folder = folder
        self.pipeline = model.pipeline
        self.device = next(model.parameters()).device
        self.description = EagerDescription(self.device.type, declared.outputs)
        self._graph = ScoringGraph(model.eval())
        self._cached = CachedModel(model) if keeps_cache(model) else None
        self._names = [spec.name for spec in scoring_signature(model.pipeline)]
        self.cache_spec = None if self._cached is None else CacheSpec.of(model)
        self._run: Callable[..., tuple[Tensor, ...]] = lambda *inputs: as_tuple(self._graph(*inputs))
        self._score: RecordedScoring | None = None
        if self.device.type == "cuda":
            self._record(model)
        self.items: Tensor | None = None
        if declared.item_feature is not None:
            batch = _empty_batch(model.pipeline).to(self.device)
            self.items = catalogue(model, batch, model.pipeline)

    def _record(self, model: Model) -> None:
        padded = PaddedInputs(model.pipeline, scoring_signature(model.pipeline))
        self._run = RecordedScoring(self._graph, padded, self.device, "scoring in one pass")
        if self.cache_spec is not None:
            padded = padded_cached_inputs(model.pipeline, self.cache_spec)
            self._score = RecordedScoring(CachedGraph(model), padded, self.device, "scoring with a cache")

    def run(self, batch: Batch) -> Tensor:
        """Returns predictions [N, tasks] of a ranker or queries [B, E] of a retriever, float32."""
        with torch.no_grad():
            (output,) = self._run(*inputs_of(batch, self.pipeline))
            return output.float()

    def find(self, batch: Batch) -> TopK:
        """Finds the best items of each row, of a model that finds items itself; rows of the item table less
        1."""
        with torch.no_grad():
            return TopK(*self._run(*inputs_of(batch, self.pipeline)))

    @property
    def keeps_cache(self) -> bool:
        """Whether histories can be encoded separately from candidates."""
        return self._cached is not None

    def prefill(self, batch: Batch) -> UserCache:
        """Encodes users and histories."""
        with torch.no_grad():
            return self._with_cache().prefill(batch.to(self.device))

    @property
    def extends(self) -> bool:
        """Whether caches can be extended by later events."""
        return self._cached is not None and self._cached.extends

    def extend(self, batch: Batch, cache: UserCache) -> UserCache:
        """Returns the cache of the users with the events of a batch appended; see `CachedModel.extend`."""
        with torch.no_grad():
            return self._with_cache().extend(batch.to(self.device), cache)

    def score(self, batch: Batch, cache: UserCache) -> Tensor:
        """Scores candidates of the users of a cache."""
        with torch.no_grad():
            replayed = None
            if self._score is not None and self.cache_spec is not None:
                named = dict(zip(self._names, inputs_of(batch, self.pipeline), strict=True))
                replayed = self._score.replay(*cached_inputs(self.pipeline, self.cache_spec, named, cache))
            if replayed is not None:
                return replayed[0]
            return self._with_cache().score(batch.to(self.device), cache)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Joins the scores of consecutive candidates."""
        return torch.cat(list(parts))

    def _with_cache(self) -> CachedModel:
        if self._cached is None:
            raise ValueError("the model scores without a cache")
        return self._cached


def load_eager(run_dir: Path, which: str, pipeline: pb.Pipeline) -> EagerPackage:
    """Loads a state of a run on the GPU, if there is one.

    Args:
        run_dir: the run folder.
        which: "best", "newest" or the number of a step.
        pipeline: the resolved config.

    Raises:
        ConfigError, DataError: the config's features, model or vocabularies are not those of the run.
        RecsysError: there is no such state, or it is damaged.
    """
    path = checkpoint.find(run_dir / CHECKPOINTS, which)
    require_same_model(checkpoint.read_state(path), pipeline, path)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return EagerPackage(load_model(path, pipeline).model.to(device), path)


def _empty_batch(pipeline: pb.Pipeline) -> Batch:
    """Returns an evaluation batch with a filler row and, if the model searches items, the whole catalogue."""
    rule = layout_rule(pipeline)
    arrays = Packer(pipeline, rule, "evaluate").filler(1)
    return Collator.open(pipeline, rule, "evaluate").collate(arrays, Position(), 0)
